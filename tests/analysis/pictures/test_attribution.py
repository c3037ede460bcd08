"""The heat table: four decimals in full, colours clipped at one."""

import numpy as np

from analysis.pictures.attribution import attribution_figure, attribution_table, shortened, visible

VALUES = np.array([[0.12345, -3.5], [-1e-7, 12.3456]])


def test_values_are_printed_in_full_and_clipped_in_colour():
    figure = attribution_figure(VALUES, ["1 ", "\n"], ["3 x 4 = 12", "b"], title="t")
    axes, bar = figure.axes
    assert [t.get_text() for t in axes.texts] == ["0.1235", "-3.5000", "0.0000", "12.3456"]
    image = axes.images[0]
    assert image.get_clim() == (-1.0, 1.0)
    red, green = image.cmap(image.norm(-3.5)), image.cmap(image.norm(12.3))
    assert red == image.cmap(image.norm(-1.0))
    assert red[0] > 0.5 > red[1]
    assert green[1] > 0.3 > green[0]
    assert bar.get_ylabel() == "Token Attribution"
    assert [t.get_text() for t in axes.get_xticklabels()] == ["3 x 4 = 12", "b"]


def test_of_very_many_the_strongest_are_shown():
    values = np.zeros((500, 60))
    values[::5, 3] = 0.01
    values[499, 59] = -2.0
    figure = attribution_figure(values, [str(n) for n in range(500)], [str(n) for n in range(60)], title="t")
    axes = figure.axes[0]
    assert axes.images[0].get_array().shape == (80, 40)
    shown = [int(t.get_text()) for t in axes.get_yticklabels()]
    assert shown == [*range(0, 395, 5), 499]
    assert [t.get_text() for t in axes.get_xticklabels()][-1] == "59"
    assert axes.get_title() == "t\nstrongest 80 of 500 tokens, 40 of 60 steps"
    assert attribution_figure(VALUES, ["1", "2"], ["a", "b"], title="t").axes[0].get_title() == "t"


def test_tokens_and_steps_can_be_told_apart():
    assert visible(" a\n") == "␣a↵"
    assert shortened("a\n b") == "a b"
    assert len(shortened("x" * 99)) == 28
    assert attribution_table(VALUES, ["1", "2"], ["a", "b"])["b"].tolist() == [-3.5, 12.3456]
