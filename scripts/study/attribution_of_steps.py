"""How often the step that derives a value has the largest attribution of that value's digit in the answer.

    python scripts/study/attribution_of_steps.py [--model toy_qwen] [--problems 100]

Problems of toy_chain (where a value is derived once, in a step of its own) with worked completions, the model's own
training form. The answer restates three values, `c is 5, d is 2, e is 7. ...`; each is a digit with a known step.
"""

import argparse
import re
import sys
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.models.load import load_model
from kvsweep.harness.predictor.traces import trace_of_text
from kvsweep.harness.settings import build, compose_config
from kvsweep.harness.toy.tasks import problems
from kvsweep.harness.trace.importance import removal
from kvsweep.harness.trace.inspected import InspectedText, token_range
from scripts.train.toy_completions import write_completion

_STEP = r"([a-p])=[a-p]\+[a-p]: .*?So \1 is \d\. "


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="toy_qwen")
    parser.add_argument("--problems", type=int, default=100)
    options = parser.parse_args()
    model = load_model(build(ModelConfig, "model", compose_config(f"model={options.model}").model))
    digits = hits = whole = 0
    for problem in problems("chain", options.problems):
        text = write_completion("chain", problem.question, Random(problem.id))
        trace, _ = trace_of_text(problem.question, text, (problem.id, 0), model.config.tags, model, problem.id)
        inspected = InspectedText(model=model, trace=trace)
        thinking = inspected.thinking
        answer = inspected.pieces[trace.answer_start :]
        matches = list(re.finditer(_STEP, "".join(thinking)))
        ranges = [token_range(thinking, *m.span()) for m in matches]
        steps = [range(trace.think_start + r.start, trace.think_start + r.stop) for r in ranges]
        found = removal(model, trace.token_ids, trace.answer_start - 1, steps)
        names = [m.group(1) for m in matches]
        right = []
        for fact in list(re.finditer(r"([a-p]) is (\d)", "".join(answer)))[:3]:
            row_number = token_range(answer, *fact.span(2)).start
            largest = names[int(found[row_number].argmax())]
            right.append(largest == fact.group(1))
            if largest != fact.group(1):
                own = float(found[row_number, names.index(fact.group(1))])
                top = float(found[row_number].max())
                print(f"{problem.id}: {fact.group(0)}: step {largest} {top:.4f}, its own {own:.4f}", flush=True)
        digits, hits, whole = digits + len(right), hits + sum(right), whole + all(right)
    score = f"{hits} of {digits} digits; all three in {whole} of {options.problems} problems"
    print(f"{options.model}: {score}")


if __name__ == "__main__":
    main()
