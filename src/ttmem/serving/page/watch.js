// One job as it goes on: its stages, the time left, its losses.

import { jobEvents } from "./api.js";
import { curves } from "./curve.js";
import { find, make, say } from "./dom.js";
import { duration, percent } from "./format.js";

const UNFINISHED = ["queued", "running"];

export const unfinished = (memory) => UNFINISHED.includes(memory.status);

// Follow a job to its end, telling each state. Ends early where the signal aborts; raises Problem.
export async function follow(id, signal, tell) {
  let stage = "";
  for await (const memory of jobEvents(id, signal)) {
    tell(memory);
    if (memory.progress && memory.progress.stage !== stage) {
      stage = memory.progress.stage;
      say(`Stage: ${stage}`);
    }
  }
}

export class Watch {
  constructor() {
    this.stages = new Map();
    this.bar = make("progress", { max: 1, value: 0, id: "progress" });
    this.note = make("p", { class: "muted", id: "progress-note" });
    this.list = make("ol", { class: "stages" });
    this.drawn = "";
  }

  // Start over for another memory.
  show(memory) {
    this.stages.clear();
    this.drawn = "";
    this.list.replaceChildren();
    find("watch").replaceChildren(make("label", { for: "progress", class: "hidden-text" }, "Progress"), this.bar, this.note, this.list);
    this.update(memory);
  }

  update(memory) {
    const running = unfinished(memory);
    const losses = memory.losses ?? {};
    const trained = Object.keys(losses).length > 0;
    find("watch-panel").hidden = !running && !trained;
    find("watch").hidden = !running;
    this.bar.value = memory.progress?.fraction ?? 0;
    this.note.textContent = note(memory);
    for (const part of memory.progress?.stages ?? []) this.stage(part, part.stage === memory.progress.stage);
    const state = JSON.stringify(losses);
    if (state !== this.drawn) {
      this.drawn = state;
      const open = find("curves").querySelector("details[open]") !== null; // do not shut a table that is being read
      if (!open) find("curves").replaceChildren(...curves(losses));
    }
  }

  stage({ stage, fraction }, current) {
    let row = this.stages.get(stage);
    if (!row) {
      const [name, part] = [make("span", {}, stage), make("span", { class: "part" })];
      row = { item: make("li", {}, name, part), part };
      this.stages.set(stage, row);
      this.list.append(row.item);
    }
    row.item.dataset.state = current && fraction < 1 ? "now" : "done";
    row.part.textContent = current && fraction < 1 ? percent(fraction) : "done";
  }
}

function note(memory) {
  if (memory.status === "queued") return "Waiting for its turn.";
  if (!memory.progress) return "";
  const left = memory.progress.seconds_left;
  return `${percent(memory.progress.fraction)}${left === null ? "" : `, about ${duration(left)} left`}`;
}
