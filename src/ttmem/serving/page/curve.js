// Losses of training as line charts, one for each stage that trains.

import { draw, make, table } from "./dom.js";
import { figure } from "./format.js";

const WIDTH = 360;
const HEIGHT = 170;
const LEFT = 46;
const RIGHT = 10;
const TOP = 10;
const BOTTOM = 30;
const LOG_FROM = 20; // falls by more than this factor are shown on a logarithmic scale

export const curves = (losses) =>
  Object.entries(losses ?? {}).filter(([, points]) => points.length).map(([stage, points]) => chart(stage, points));

function chart(stage, points) {
  const text = summary(points);
  return make("figure", { class: "curve" },
    make("figcaption", {}, `Loss, ${stage}`),
    picture(stage, points, text),
    make("p", { class: "hint" }, text),
    table(`Loss, ${stage}`, ["Update", "Loss"], points.map(([step, loss]) => [step, figure(loss)])));
}

function summary(points) {
  const [first, last] = [points[0], points.at(-1)];
  const lowest = points.reduce((best, point) => (point[1] < best[1] ? point : best));
  if (points.length === 1) return `${figure(first[1])} at update ${first[0]}.`;
  return `From ${figure(first[1])} to ${figure(last[1])} after ${last[0]} updates; lowest ${figure(lowest[1])}.`;
}

function picture(stage, points, text) {
  const values = points.map((point) => point[1]);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const log = low > 0 && high / low > LOG_FROM;
  const bottom = log ? low : Math.min(0, low);
  const across = log ? Math.log(high / bottom) : high - bottom || 1;
  const [start, end] = [points[0][0], points.at(-1)[0]];
  const x = (step) => LEFT + ((WIDTH - LEFT - RIGHT) * (step - start)) / (end - start || 1);
  const y = (loss) =>
    HEIGHT - BOTTOM - ((HEIGHT - TOP - BOTTOM) * (log ? Math.log(loss / bottom) : loss - bottom)) / across;
  const ticks = [0, 0.5, 1].map((part) => (log ? bottom * Math.exp(part * across) : bottom + part * across));
  const line = points.map(([step, loss]) => `${x(step).toFixed(1)},${y(loss).toFixed(1)}`).join(" ");
  const [lastX, lastY] = [x(end), y(values.at(-1))];
  return draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `Loss, ${stage}. ${text}` },
    ...ticks.flatMap((value) => [
      draw("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }),
      draw("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, figure(value)),
    ]),
    draw("text", { x: LEFT, y: HEIGHT - 10 }, `${start}`),
    draw("text", { x: WIDTH - RIGHT, y: HEIGHT - 10, "text-anchor": "end" }, end === start ? "" : `update ${end}`),
    draw("polyline", { class: "line", points: line }),
    draw("circle", { class: "dot", cx: lastX.toFixed(1), cy: lastY.toFixed(1), r: 3.5 }));
}
