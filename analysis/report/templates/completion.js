"use strict";
// A model's texts enter the page as text nodes only, so that no text can become markup.
const make = (tag, text, name) => {
  const node = document.createElement(tag);
  if (text !== undefined && text !== null) node.textContent = text;
  if (name) node.className = name;
  return node;
};

// From the first eviction to the last; more evictions than shades share them.
const shades = ["#8c2d04", "#cc4c02", "#ec7014", "#fe9929", "#fec44f", "#fee391"];

function shade(node, eviction, evictions) {
  const index = evictions > 1 ? Math.floor((eviction * (shades.length - 1)) / (evictions - 1)) : 1;
  node.style.backgroundColor = shades[index];
  node.style.color = index < 3 ? "#fff" : "#000";
}

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
  const span = make("span"), share = held.at(-1);
  if (share < 0 || share === 100) return span;
  span.className = "evicted";
  span.title = `${share}% of the heads still hold it`;
  if (share) span.style.backgroundColor = `rgba(213,94,0,${0.45 * (1 - share / 100)})`;
  else shade(span, held.indexOf(0), evictions);
  return span;
}

// The text in a box, shaded by what is gone after an eviction (-1: nothing); if not `whole`, as far as written by then.
function fillText(box, draw, eviction, whole = true) {
  box.replaceChildren();
  const end = draw.text.indexOf("</think>"), answerAt = end < 0 ? draw.text.length : end;
  const lengths = draw.lengths && eviction >= 0 ? draw.lengths : [answerAt, draw.text.length - answerAt];
  const held = lengths === draw.lengths ? draw.held.slice(0, eviction + 1) : [];
  const after = held.map((runs) => heldAt(runs, draw.prompt + lengths.length));
  const answer = make("span", null, "answer");
  let place = 0, span = null, before = null;
  lengths.forEach((length, i) => {
    const text = draw.text.slice(place, place + length), isAnswer = place >= answerAt;
    place += length;
    const shares = after.map((one) => one[draw.prompt + i]);
    if (!text || (!whole && shares.at(-1) < 0)) return;
    const look = `${shares.at(-1)} ${shares.indexOf(0)} ${isAnswer} ${i < draw.question}`;
    if (look !== before) {
      span = tokenSpan(shares, draw.held ? draw.held.length : 0);
      if (i < draw.question) span.classList.add("question");
      (isAnswer ? answer : box).append(span);
      before = look;
    }
    span.append(text);
  });
  if (answer.textContent) box.append(answer);
}
