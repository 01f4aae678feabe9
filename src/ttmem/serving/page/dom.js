// Elements, and the page's two voices: what has happened, and what went wrong.

const SVG = "http://www.w3.org/2000/svg";

export const find = (id) => document.getElementById(id);

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export const make = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);

export const draw = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);

// Terms and values for a <dl>.
export const pairs = (entries) =>
  entries.map(([term, value, key]) =>
    make("div", {}, make("dt", {}, term), make("dd", key ? { "data-figure": key } : {}, value)));

// Figures of a chart as a table, for who does not see the chart.
export function table(caption, head, rows) {
  const cell = (value, index) => make(index ? "td" : "th", index ? {} : { scope: "row" }, String(value));
  return make("details", { class: "numbers" },
    make("summary", {}, "Numbers"),
    make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
      make("table", {}, make("caption", {}, caption),
        make("thead", {}, make("tr", {}, ...head.map((name) => make("th", { scope: "col" }, name)))),
        make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map(cell)))))));
}

// For screen readers; what is seen changes by itself.
export function say(text) {
  find("said").textContent = text;
}

export function showProblem(error, place = find("problem")) {
  place.textContent = error.message;
  place.hidden = false;
}

export function clearProblem(place = find("problem")) {
  place.hidden = true;
  place.textContent = "";
}
