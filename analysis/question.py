"""The question's place in the policies of a run: prompt tokens compete, are pinned in the cache or lie on top."""

import pandas as pd

from kvsweep.analysis.format import policy_title

TITLES = {"free": "free", "pinned": "pinned", "on_top": "on top"}


def question_title(cells: pd.DataFrame) -> str:
    """The place of the question in some cells: "question pinned", or which policies differ from the most.

    For policies that differ are no equals, as in "question pinned for DynTS and SnapKV, free for the others".
    """
    asked = cells[cells["question"] != ""].drop_duplicates(["policy", "question"])
    places = asked["question"].value_counts()
    if len(places) < 2:
        return "".join(f"question {TITLES.get(place, place)}" for place in places.index)
    most, *others = places.index
    names = asked["policy"].map(policy_title).groupby(asked["question"]).agg(_listed)
    told = [f"{TITLES.get(place, place)} for {names[place]}" for place in others]
    return f"question {', '.join(told)}, {TITLES.get(most, most)} for the others"


def _listed(names: pd.Series) -> str:
    """a, b and c."""
    *before, last = names
    return f"{', '.join(before)} and {last}" if before else str(last)


def by_question(cells: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """The cells by the question's place, the full cache's in each part; in one part, "", if no policy has several."""
    asked = cells["question"] != ""
    if cells[asked].groupby("policy")["question"].nunique().max() <= 1 or not asked.any():
        return [("", cells)]
    places = [place for place in TITLES if (cells["question"] == place).any()]
    return [(place, cells[~asked | (cells["question"] == place)]) for place in places]
