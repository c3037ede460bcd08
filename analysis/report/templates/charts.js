const svgNode = (tag, attributes, ...children) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  Object.entries(attributes).forEach(([name, value]) => node.setAttribute(name, value));
  node.append(...children);
  return node;
};
const COLOURS = { full: "var(--full)", cell: "var(--cell)" };

// A frame with both axes; x and y turn values into places. Several charts share it. On a phone it is narrower, with letters of full size.
function frame(widest, height, xMax, yMax, xLabel, yLabel, spoken) {
  const width = Math.min(widest, Math.max(240, innerWidth - 92));
  const left = 44, bottom = 30, top = 8, right = 12;
  const x = (value) => left + ((width - left - right) * value) / xMax;
  const y = (value) => height - bottom - ((height - bottom - top) * value) / yMax;
  const node = svgNode("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": spoken });
  for (const share of [0, 0.5, 1]) {
    const at = y(share * yMax), across = x(share * xMax);
    node.append(svgNode("line", { x1: left, x2: width - right, y1: at, y2: at, stroke: "var(--rule)" }));
    node.append(svgNode("text", { x: left - 5, y: at + 4, "text-anchor": "end", fill: "currentColor" }, `${Math.round(share * yMax)}`));
    node.append(svgNode("text", { x: across, y: height - bottom + 13, "text-anchor": share ? (share < 1 ? "middle" : "end") : "start", fill: "currentColor" }, `${Math.round(share * xMax)}`));
  }
  node.append(svgNode("text", { x: (left + width) / 2, y: height - 4, "text-anchor": "middle", fill: "var(--soft)" }, xLabel));
  node.append(svgNode("text", { x: 10, y: (height - bottom) / 2, "text-anchor": "middle", transform: `rotate(-90 10 ${(height - bottom) / 2})`, fill: "var(--soft)" }, yLabel));
  return { node, x, y };
}

const line = (points, colour, extra = {}) =>
  svgNode("polyline", { points: points.map((point) => point.join(",")).join(" "), fill: "none", stroke: colour, "stroke-width": 2, ...extra });

// The length of both caches over the tokens of the text; `at` is the eviction that the slider shows.
function timeline(draw, twin, at) {
  const most = Math.max(draw.tokens, twin ? twin.tokens : 0), full = twin || draw;
  const top = Math.max(full.prompt + full.tokens, draw.prompt + (draw.evictions.length ? 0 : draw.tokens), ...draw.evictions.map((one) => one[1]));
  const spoken = `Cache length over the text: ${counted(draw.evictions.length, "eviction")}`;
  const { node, x, y } = frame(640, 130, most, top, "tokens written", "cache, tokens", spoken);
  node.append(line([[x(0), y(full.prompt)], [x(full.tokens), y(full.prompt + full.tokens)]], COLOURS.full, { "stroke-dasharray": "4 3" }));
  const points = [[x(0), y(draw.prompt)]];
  let from = 0, length = draw.prompt;
  draw.evictions.forEach(([step, before, after], i) => {
    points.push([x(step), y(before)], [x(step), y(after)]);
    [from, length] = [step, after];
    if (i === at) node.append(svgNode("line", { x1: x(step), x2: x(step), y1: y(0), y2: y(top), stroke: "var(--fork)", "stroke-width": 2 }));
  });
  node.append(line([...points, [x(draw.tokens), y(length + draw.tokens - from)]], COLOURS.cell));
  return node;
}

// Wilson's 95% interval.
function wilson(right, count) {
  const z = 1.96, p = right / count, scale = 1 + (z * z) / count, middle = (p + (z * z) / (2 * count)) / scale;
  const half = (z / scale) * Math.sqrt((p * (1 - p)) / count + (z * z) / (4 * count * count));
  return [middle - half, middle + half];
}

// Accuracy of a cell and of the full cache against the length of the full cache's text, in fifths of the completions.
function lengthChart(pairs) {
  const beside = pairs.filter(({ twin }) => twin), known = (beside.length ? beside : pairs).filter(({ draw, twin }) => draw.outcome && (!twin || twin.outcome));
  const lengthOf = ({ draw, twin }) => sizeOf(twin || draw);
  known.sort((a, b) => lengthOf(a) - lengthOf(b));
  const bins = Math.min(5, Math.floor(known.length / 5));
  if (!bins) return make("p", "There are too few graded completions for a chart.", "note");
  const view = make("div");
  const groups = [...Array(bins).keys()].map((i) => known.slice((i * known.length) / bins, ((i + 1) * known.length) / bins));
  const { node, x, y } = frame(460, 190, lengthOf(known.at(-1)), 100, known[0].draw.characters === undefined ? "tokens of the full cache's text" : "characters of the first file's text", "right, %", "Accuracy against text length");
  const kinds = known[0].twin ? ["full", "cell"] : ["cell"];
  kinds.forEach((kind, shift) => {
    const points = groups.map((group) => {
      const right = group.filter((pair) => (kind === "full" ? pair.twin : pair.draw).outcome === "correct").length;
      const place = x(group.reduce((sum, pair) => sum + lengthOf(pair), 0) / group.length) + 4 * shift;
      const [low, high] = wilson(right, group.length);
      node.append(svgNode("line", { x1: place, x2: place, y1: y(100 * low), y2: y(100 * high), stroke: COLOURS[kind] }));
      return [place, y((100 * right) / group.length)];
    });
    node.append(line(points, COLOURS[kind], kind === "full" ? { "stroke-dasharray": "4 3" } : {}));
    points.forEach(([cx, cy]) => node.append(svgNode("circle", { cx, cy, r: 3.5, fill: COLOURS[kind] })));
  });
  view.append(node, make("p", "Dashed is the full cache. The completions fall into at most five groups of equal size; the bars are 95% intervals.", "note"));
  return view;
}
