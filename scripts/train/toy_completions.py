"""Worked completions of the toy tasks, the texts that the embedded models were trained on."""

from random import Random

from kvsweep.harness.toy.tasks import TASKS

_OPENINGS = ("Let me go step by step. ", "Ok, let me see. ", "Let me start. ", "Hmm, let me think. ")
_ENDINGS = ("Done.", "That is all.", "Ok, all done.")
# A remark carries no new fact, so a good policy drops its tokens.
_REMARKS = (
    "",
    "",
    "Good, go on. ",
    "Ok, next one. ",
    "That looks right, let me go on. ",
    "Check {equation} ok. ",
    "Hmm, wait. Let me redo: {equation}. ",
    "Wait, is it right? Yes, {equation}. ",
    "Let me see again, {equation}. Fine, next one. ",
)


def write_completion(task: str, question: str, rng: Random) -> str:
    r"""A worked completion: thinking with random remarks, `</think>`, the needed facts, `\boxed{answer}`."""
    solution = TASKS[task].solve(question)
    thinking = [rng.choice(_OPENINGS)]
    for step in solution.steps:
        thinking.append(step.text)
        thinking.append(rng.choice(_REMARKS).format(equation=step.equation))
    thinking.append(rng.choice(_ENDINGS))
    return f"{''.join(thinking)}</think>{solution.closing} \\boxed{{{solution.answer}}}"
