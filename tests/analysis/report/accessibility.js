// The problems of a page: names of controls, references, and text below WCAG's contrast of 4.5 (of 3 if it is large).
const problems = [], visible = (node) => node.checkVisibility({ checkOpacity: true, checkVisibilityCSS: true });
const known = new Set();
document.querySelectorAll("[id]").forEach((node) => (known.has(node.id) ? problems.push(`id ${node.id} twice`) : known.add(node.id)));
const named = (node) => node.getAttribute("aria-label") || node.textContent.trim() || (node.labels && node.labels.length);
document.querySelectorAll("button, a, input, select, summary, [role=region], [role=grid], svg[role=img]").forEach((node) => {
  if (!named(node)) problems.push(`no name: ${node.outerHTML.slice(0, 80)}`);
});
document.querySelectorAll("img:not([alt])").forEach((node) => problems.push("img without alt"));
document.querySelectorAll("[aria-labelledby]").forEach((node) => {
  if (visible(node) && !document.getElementById(node.getAttribute("aria-labelledby"))) problems.push("aria-labelledby");
});
if (!document.documentElement.lang || !document.title || document.querySelectorAll("main").length !== 1) problems.push("page");
const paint = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
const rgba = (css) => {
  paint.clearRect(0, 0, 1, 1);
  paint.fillStyle = css;
  paint.fillRect(0, 0, 1, 1);
  const [r, g, b, a] = paint.getImageData(0, 0, 1, 1).data;
  return [r, g, b, a / 255];
};
const luminance = (colour) => colour.slice(0, 3).map((c) => c / 255).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
  .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
const behind = (node) => {
  if (!node) return [255, 255, 255, 1];
  const own = rgba(getComputedStyle(node).backgroundColor);
  if (own[3] === 1) return own;
  const below = node.tagName === "DIALOG" ? [255, 255, 255, 1] : behind(node.parentElement);
  return below.map((c, i) => (i < 3 ? own[i] * own[3] + c * (1 - own[3]) : 1));
};
let texts = 0;
for (const node of document.body.querySelectorAll("*")) {
  const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
  if (!own || node.closest("svg, script, option") || !visible(node)) continue;
  texts += 1;
  const style = getComputedStyle(node), pair = [luminance(rgba(style.color)), luminance(behind(node))].sort();
  const size = parseFloat(style.fontSize), large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
  const contrast = (pair[1] + 0.05) / (pair[0] + 0.05);
  if (contrast < (large ? 3 : 4.5)) problems.push(`${contrast.toFixed(2)}: ${node.outerHTML.slice(0, 120)}`);
}
return [texts, problems];
