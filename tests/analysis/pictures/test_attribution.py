"""The heat table: four decimals in full, colours clipped at one."""

import numpy as np

from kvsweep.analysis.pictures.attribution import attribution_figure, attribution_table, shortened, visible

VALUES = np.array([[0.12345, -3.5], [-1e-7, 12.3456]])


def test_values_are_printed_in_full_and_clipped_in_colour():
    figure = attribution_figure(VALUES, ["1 ", "\n"], ["3 x 4 = 12", "b"], title="t")
    axes, bar = figure.axes
    assert [t.get_text() for t in axes.texts] == ["0.1235", "-3.5000", "0.0000", "12.3456"]
    mesh = axes.collections[0]
    assert mesh.get_clim() == (-1.0, 1.0)
    red, blue = mesh.to_rgba(-3.5), mesh.to_rgba(12.3)
    assert red == mesh.to_rgba(-1.0)
    assert red[0] > 0.3 > red[2]
    assert blue[2] > 0.3 > blue[0]
    green = attribution_figure(VALUES, ["1 ", "\n"], ["3 x 4 = 12", "b"], title="t", cmap="RdYlGn")
    assert green.axes[0].collections[0].to_rgba(1.0)[1] > 0.3 > green.axes[0].collections[0].to_rgba(1.0)[0]
    assert bar.get_ylabel() == "Token Attribution"
    assert [t.get_text() for t in axes.get_xticklabels()] == ["3 x 4 = 12", "b"]


def test_of_very_many_the_strongest_are_shown():
    values = np.zeros((500, 60))
    values[::5, 3] = 0.01
    values[499, 59] = -2.0
    values[0, 7:9] = 0.0001  # faint: summed up with the others
    figure = attribution_figure(values, [str(n) for n in range(500)], [str(n) for n in range(60)], title="t")
    axes = figure.axes[0]
    assert axes.collections[0].get_array().shape == (36, 3)
    shown = [int(t.get_text()) for t in axes.get_yticklabels()]
    assert shown == [*range(0, 175, 5), 499]
    assert [t.get_text() for t in axes.get_xticklabels()] == ["3", "59", "sum of 58 others"]
    assert axes.texts[2].get_text() == "0.0002"
    assert axes.xaxis.get_label_position() == "top"
    note = figure.get_supxlabel()
    assert "the colours end at -1 and 1" in note
    assert "the 2 of 60 steps with the largest effects\nthe 36 of 500 tokens" in note
    assert "of 2" not in attribution_figure(VALUES, ["1", "2"], ["a", "b"], title="t").get_supxlabel()


def test_tokens_and_steps_can_be_told_apart():
    assert visible(" a\n") == "␣a↵"
    assert shortened("a\n b") == "a b"
    assert len(shortened("x" * 99)) == 32
    assert shortened("So the total of all is 3 x 4 = 12, and this is even.") == "So the total of all i…3 x 4 = 12"
    assert attribution_table(VALUES, ["1", "2"], ["a", "b"])["b"].tolist() == [-3.5, 12.3456]
