const cells = new Map(), waiting = new Map();
const files = JSON.parse(document.getElementById("files").textContent);
const shown = 25;

window.kvsweepCell = (id, data) => {
  cells.set(id, data);
  if (waiting.has(id)) waiting.get(id)();
};

function withCell(id, use) {
  const block = [...document.querySelectorAll("script[data-for]")].find((one) => one.dataset.for === id);
  if (!cells.has(id) && block) cells.set(id, JSON.parse(block.textContent));
  if (cells.has(id)) return use(cells.get(id));
  if (!files[id]) return use({ problems: [], left_out: 0 });
  waiting.set(id, () => use(cells.get(id)));
  const script = document.createElement("script");
  script.src = files[id];
  script.onerror = () => { document.getElementById("drill").textContent = `${files[id]} is not beside this page.`; };
  document.head.append(script);
}

const isWorse = (draw) => draw.full === 1 && draw.outcome && draw.outcome !== "correct";

function drawView(draw) {
  const view = make("div"), line = make("p");
  line.append(`draw ${draw.draw}: `, make("b", draw.outcome || "no grade", draw.outcome));
  line.append(`, answer ${draw.answer ?? "none"}, ${draw.tokens} tokens, ${(draw.evictions || []).length} evictions `);
  if (draw.loop) line.append(`, ends in a loop: ${draw.loop[0]} tokens, ${draw.loop[1]} times `);
  if (isWorse(draw)) line.append(make("span", "right with the full cache", "worse"));
  view.append(line);
  if (draw.text === undefined) return view;
  const box = make("div", null, "draw");
  const events = draw.held ? draw.held.length : 0;
  if (events) {
    const label = make("label", "shade what is gone (darker: gone earlier) after eviction ");
    const choice = make("input"), number = make("span", events);
    Object.assign(choice, { type: "range", min: 0, max: events, value: events });
    choice.oninput = () => { number.textContent = choice.value; fillText(box, draw, choice.value - 1); };
    label.append(choice, number);
    view.append(label);
  } else if ((draw.evictions || []).length) {
    view.append(make("p", "Which tokens were evicted is not recorded here, or the model's tokenizer is not on the reporting machine.", "note"));
  }
  fillText(box, draw, events - 1);
  view.append(box);
  return view;
}

function problemView(problem) {
  const view = make("details", null, "plain problem");
  const right = problem.draws.filter((one) => one.outcome === "correct").length;
  const graded = problem.draws.filter((one) => one.outcome).length;
  const worse = problem.draws.filter(isWorse).length;
  const head = make("summary", `${problem.id}: ${right} of ${graded} right `);
  if (worse) head.append(make("span", `${worse} right with the full cache, not here`, "worse"));
  view.append(head);
  view.addEventListener("toggle", () => {
    if (!view.open || view.children.length > 1) return;
    view.append(make("p", problem.question ?? "The question is not stored."));
    view.append(make("p", `gold: ${problem.gold ?? "not stored"}`));
    problem.draws.forEach((one) => view.append(drawView(one)));
  });
  return view;
}

function show(id, name) {
  const drill = document.getElementById("drill");
  drill.replaceChildren(make("p", "loading"));
  withCell(id, (data) => {
    drill.replaceChildren(make("h3", `${name} (${id})`));
    if (data.left_out) drill.append(make("p", `The run directory holds ${data.left_out} more completions.`, "note"));
    if (!data.problems.length) drill.append(make("p", "No completion yet."));
    const list = make("div"), more = make("button", "more problems");
    more.onclick = () => {
      const from = list.children.length;
      data.problems.slice(from, from + shown).forEach((one) => list.append(problemView(one)));
      more.hidden = list.children.length >= data.problems.length;
    };
    more.onclick();
    drill.append(list, more);
    drill.scrollIntoView();
  });
}

document.querySelectorAll("button[data-cell]").forEach((button) => {
  const row = [...button.closest("tr").cells].slice(0, 6).map((cell) => cell.textContent.trim());
  const title = button.closest("table").tHead.rows[0].cells[0].textContent;
  const heat = button.classList.contains("cell");
  const ratio = button.closest("table").tHead.rows[0].cells[button.closest("td").cellIndex].textContent;
  const name = heat ? `${title}: keep ratio ${ratio}, window ${row[0]}` : row.join(" | ");
  button.addEventListener("click", () => show(button.dataset.cell, name));
});

const numberOf = (text) => {
  const found = text.replace(/,/g, "").replace("<", "").match(/^[+-]?\d+(\.\d+)?/);
  return found ? Number(found[0]) : NaN;
};
document.querySelectorAll("table:not(.heatmap)").forEach((table) => {
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    head.classList.add("sortable");
    head.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      [...table.tHead.rows[0].cells].forEach((one) => one.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...table.tBodies[0].rows].map((row) => [row, row.cells[column].textContent.trim()]);
      rows.sort(([, a], [, b]) => {
        const [x, y] = [numberOf(a), numberOf(b)];
        if (isNaN(x) !== isNaN(y)) return isNaN(x) ? 1 : -1;
        return (isNaN(x) ? a.localeCompare(b) : x - y) * (down ? -1 : 1);
      });
      table.tBodies[0].append(...rows.map(([row]) => row));
    });
  });
});
