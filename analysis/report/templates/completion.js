"use strict";
// A model's texts enter the page as text nodes only, so that no text can become markup.
const make = (tag, text, name) => {
  const node = document.createElement(tag);
  if (text !== undefined && text !== null) node.textContent = text;
  if (name) node.className = name;
  return node;
};

// A token that is gone is pale and struck through, so that the eye goes to what was kept; the line fades from the first
// eviction to the last.
function shade(node, eviction, evictions) {
  const share = evictions > 1 ? eviction / (evictions - 1) : 0;
  node.style.color = "var(--soft, #57606a)";
  node.style.textDecoration = `line-through color-mix(in srgb, var(--cell, #d55e00) ${Math.round(100 - 70 * share)}%, transparent) 1px`;
}

// The number of tokens of prompt and text that were written when runs [percent, count, ...] were noted.
const writtenBy = (runs) => runs.reduce((sum, count, i) => sum + (i % 2 ? count : 0), 0);

// Percent of the heads that hold each token, from runs [percent, count, ...]; -1 for a token not yet written.
function heldAt(runs, length) {
  const held = new Int8Array(length).fill(-1);
  for (let i = 0, place = 0; i < runs.length; i += 2) {
    held.fill(runs[i], Math.min(place, length), Math.min(place + runs[i + 1], length));
    place += runs[i + 1];
  }
  return held;
}

// The look of one token after an eviction; tokens of the same look share a span.
function tokenSpan(held, evictions) {
  const span = make("span"), share = held.at(-1) ?? -1;
  if (share < 0 || share === 100) return span;
  span.className = "evicted";
  span.title = `${share}% of the heads still hold it`;
  if (share) span.style.backgroundColor = `rgba(213,94,0,${(0.3 * (1 - share / 100)).toFixed(3)})`;
  else shade(span, held.indexOf(0), evictions);
  return span;
}

// The text in a box: its first `upto` tokens, shaded by what is gone after an eviction (-1: nothing), with a mark before
// the token `fork` and on the token `differs`.
function fillText(box, draw, { eviction = -1, upto = Infinity, fork = -1, differs = -1 }) {
  box.replaceChildren();
  const end = draw.text.indexOf("</think>"), answerAt = end < 0 ? draw.text.length : end;
  const lengths = draw.lengths || [answerAt, draw.text.length - answerAt];
  const held = draw.lengths && draw.held ? draw.held.slice(0, eviction + 1) : [];
  const after = held.map((runs) => heldAt(runs, draw.prompt + lengths.length));
  const answer = make("span", null, "answer");
  let place = 0, span = null, before = null;
  lengths.slice(0, upto).forEach((length, i) => {
    const text = draw.text.slice(place, place + length), isAnswer = place >= answerAt;
    place += length;
    const target = isAnswer ? answer : box;
    if (i === fork) target.append(make("span", null, "fork"));
    const shares = after.map((one) => one[draw.prompt + i]);
    const look = `${shares.at(-1)} ${shares.indexOf(0)} ${isAnswer} ${i < draw.question} ${i === differs}`;
    if (!text) return;
    if (look !== before || i === fork) {
      span = tokenSpan(shares, draw.held ? draw.held.length : 0);
      if (i < draw.question) span.classList.add("question");
      if (i === differs) span.classList.add("differs");
      target.append(span);
      before = look;
    }
    span.append(text);
  });
  if (answer.hasChildNodes()) box.append(answer);
}
