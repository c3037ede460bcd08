"""The kinds of importance label.

`answer` is the mean attention that the answer pays to a token. `far_max` is the largest attention that any much later
token pays to it, and `later` the mean over those tokens. `kernels.reference.importance_labels` defines all three.
"""

from typing import Literal, get_args

LabelKind = Literal["answer", "far_max", "later"]
LABEL_KINDS: tuple[LabelKind, ...] = get_args(LabelKind)
