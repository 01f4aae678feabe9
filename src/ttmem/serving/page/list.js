// The memories, each a button that opens it. Entries are changed in place, so that focus stays where it is.

import { find, make } from "./dom.js";
import { bytes, count, percent, title } from "./format.js";

export const WORDS = { queued: "waiting", running: "compacting", ready: "ready", failed: "failed", cancelled: "cancelled" };

export class MemoryList {
  constructor(open) {
    this.open = open;
    this.rows = new Map();
  }

  // Newest first.
  update(memories, selected) {
    const root = find("list");
    const ids = new Set(memories.map((memory) => memory.id));
    for (const [id, row] of this.rows) {
      if (!ids.has(id)) {
        row.item.remove();
        this.rows.delete(id);
      }
    }
    [...memories].reverse().forEach((memory, index) => {
      const row = this.rows.get(memory.id) ?? this.add(memory.id);
      row.update(memory, memory.id === selected);
      if (root.children[index] !== row.item) root.insertBefore(row.item, root.children[index] ?? null);
    });
    find("empty").hidden = memories.length > 0;
  }

  add(id) {
    const row = new Row(() => this.open(id));
    this.rows.set(id, row);
    return row;
  }
}

class Row {
  constructor(open) {
    this.name = make("span", { class: "name" });
    this.badge = make("span", { class: "badge" });
    this.about = make("span", { class: "muted about" });
    this.button = make("button", { type: "button", class: "item", onclick: open }, this.name, this.badge, this.about);
    this.item = make("li", {}, this.button);
  }

  update(memory, selected) {
    this.name.textContent = title(memory);
    this.badge.textContent = WORDS[memory.status];
    this.badge.dataset.status = memory.status;
    this.about.textContent = about(memory);
    if (selected) this.button.setAttribute("aria-current", "true");
    else this.button.removeAttribute("aria-current");
  }
}

function about(memory) {
  if (memory.progress) return `${memory.progress.stage}, ${percent(memory.progress.fraction)}`;
  if (memory.error) return memory.error.message;
  if (!memory.details) return "";
  const { document, loaded_bytes: held } = memory.details;
  return `${count(document.tokens)} tokens in ${bytes(held)}`;
}
