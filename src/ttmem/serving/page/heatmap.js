// Where a memory's budget went: layers across, KV heads down.

import { draw, make, table } from "./dom.js";
import { count, figure } from "./format.js";

const CELL = 20;
const GAP = 2;
const LEFT = 26;
const BOTTOM = 24;
const PALEST = 0.06;

const KEPT = "Entries kept";
const BIAS = "Mean bias";
const PRESERVED = "Preservers";

export function heatmap(budget) {
  const place = make("div");
  const choices = budget.roles ? [KEPT, PRESERVED, BIAS] : [KEPT, BIAS];
  const show = (choice) => place.replaceChildren(...map(budget, choice));
  const radios = choices.map((choice, index) =>
    make("label", { class: "choice" },
      make("input", { type: "radio", name: "heat", value: choice, checked: index === 0, onchange: () => show(choice) }),
      choice));
  show(KEPT);
  return [
    make("p", {}, intro(budget)),
    make("fieldset", { class: "choices" }, make("legend", {}, "Shown"), ...radios),
    place,
  ];
}

function intro(budget) {
  const heads = budget.layers.filter((layer) => !layer.window).reduce((sum, layer) => sum + layer.entries.length, 0);
  const text = `${count(budget.entries)} entries for ${count(budget.document_tokens)} tokens of the document, ` +
    `${figure(budget.entries / heads)} per layer and KV head on average.`;
  if (!budget.roles) return text;
  const { anchors, diversifiers } = budget.roles;
  return `${text} In every head ${anchors} began as anchors and ${diversifiers} as diversifiers, the rest as preservers.`;
}

// The figure of one layer and head, null where there is none: a sliding window is kept as it is.
function value(budget, layer, head, choice) {
  if (layer.window) return null;
  if (choice === BIAS) return layer.biases[head]?.mean ?? null;
  const latents = choice === PRESERVED ? budget.roles.anchors + budget.roles.diversifiers : 0;
  return layer.entries[head] - latents;
}

function map(budget, choice) {
  const cells = budget.layers.flatMap((layer) =>
    layer.entries.map((_, head) => ({ layer: layer.layer, head, window: layer.window, value: value(budget, layer, head, choice) })));
  const known = cells.filter((cell) => cell.value !== null);
  const most = Math.max(...known.map((cell) => Math.abs(cell.value)), 1e-9);
  const text = summary(known, choice);
  const heads = Math.max(...budget.layers.map((layer) => layer.entries.length));
  const [width, height] = [LEFT + budget.layers.length * CELL, heads * CELL + BOTTOM];
  const picture = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${choice}. ${text}` },
    ...cells.map((cell) => square(cell, most, choice)),
    ...Array.from({ length: heads }, (_, head) =>
      draw("text", { x: LEFT - 6, y: head * CELL + CELL - 6, "text-anchor": "end" }, `${head}`)),
    ...budget.layers.filter((layer) => layer.layer % 5 === 0).map((layer) =>
      draw("text", { x: LEFT + layer.layer * CELL + CELL / 2, y: height - 8, "text-anchor": "middle" }, `${layer.layer}`)));
  const frame = make("div", { class: "heat", tabindex: "0", role: "region", "aria-label": "Heat map of layers and heads" }, picture);
  picture.style.minWidth = `${LEFT / 2 + budget.layers.length * 15}px`;
  picture.style.maxWidth = `${width * 1.6}px`;
  const names = Array.from({ length: heads }, (_, head) => `Head ${head}`);
  const rows = budget.layers.map((layer) => [
    layer.layer,
    ...layer.entries.map((_, head) => {
      const found = value(budget, layer, head, choice);
      return found === null ? (layer.window ? "window" : "none") : figure(found);
    }),
  ]);
  return [
    frame,
    legend(most, choice, known.some((cell) => cell.value < 0)),
    make("p", { class: "hint" }, text),
    table(`${choice} by layer and head`, ["Layer", ...names], rows),
  ];
}

function square(cell, most, choice) {
  const where = `layer ${cell.layer}, head ${cell.head}`;
  const told = cell.value === null
    ? `${where}: ${cell.window ? `a sliding window of ${cell.window}, kept as it is` : "nothing kept"}`
    : `${where}: ${choice.toLowerCase()} ${figure(cell.value)}`;
  const part = cell.value === null ? 0 : PALEST + (1 - PALEST) * (Math.abs(cell.value) / most);
  const kind = cell.value === null ? "cell none" : cell.value < 0 ? "cell below" : "cell";
  return draw("rect", {
    class: kind,
    x: LEFT + cell.layer * CELL + GAP / 2,
    y: cell.head * CELL + GAP / 2,
    width: CELL - GAP,
    height: CELL - GAP,
    rx: 2,
    "fill-opacity": part.toFixed(3),
  }, draw("title", {}, told));
}

function legend(most, choice, below) {
  const parts = [0.06, 0.25, 0.5, 0.75, 1];
  const box = (kind) => (part) =>
    draw("svg", { viewBox: "0 0 14 14", class: "key-cell", "aria-hidden": "true" },
      draw("rect", { class: kind, width: 14, height: 14, rx: 2, "fill-opacity": part }));
  const items = [...parts.map(box("cell")), make("span", {}, figure(most))];
  if (below) items.unshift(make("span", {}, figure(-most)), ...[...parts].reverse().map(box("cell below")), make("span", {}, "0"));
  else items.unshift(make("span", {}, "0"));
  return make("p", { class: "legend" }, ...items, make("span", { class: "muted" }, `${choice.toLowerCase()}; layers across, heads down`));
}

function summary(known, choice) {
  if (!known.length) return "Nothing to show.";
  const [highest, lowest] = known.reduce(
    ([high, low], cell) => [cell.value > high.value ? cell : high, cell.value < low.value ? cell : low], [known[0], known[0]]);
  const at = (cell) => `${figure(cell.value)} in layer ${cell.layer}, head ${cell.head}`;
  return `${choice}: most ${at(highest)}; least ${at(lowest)}.`;
}
