// The form for a new memory: a file, dropped or chosen, or pasted text.

import { createFromFile, createFromText, importFile } from "./api.js";
import { clearProblem, find, say, showProblem } from "./dom.js";

export function setUpUpload(created) {
  const form = find("new");
  const drop = find("drop");
  const problem = find("new-problem");

  for (const kind of ["dragenter", "dragover"]) {
    drop.addEventListener(kind, (event) => {
      event.preventDefault();
      drop.classList.add("over");
    });
  }
  for (const kind of ["dragleave", "drop"]) drop.addEventListener(kind, () => drop.classList.remove("over"));
  drop.addEventListener("drop", (event) => {
    event.preventDefault();
    if (event.dataTransfer.files.length) find("file").files = event.dataTransfer.files;
  });
  // A file dropped beside the field would replace the page.
  for (const kind of ["dragover", "drop"]) window.addEventListener(kind, (event) => event.preventDefault());

  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    clearProblem(problem);
    const button = find("compact");
    button.disabled = true;
    button.textContent = "Uploading…";
    try {
      const memory = await send();
      say("The document is uploaded.");
      find("file").value = find("text").value = find("name").value = "";
      created(memory);
    } catch (error) {
      showProblem(error, problem);
      if (error.status === 401) showProblem(error);
    } finally {
      button.disabled = false;
      button.textContent = "Compact";
    }
  });
}

function send() {
  const [file, text, name] = [find("file").files[0], find("text").value, find("name").value.trim()];
  if (!file && !text.trim()) throw new Error("Choose a document, or paste its text.");
  const form = new FormData();
  if (name) form.append("name", name);
  if (file?.name.endsWith(".ttmem")) {
    form.append("file", file);
    return importFile(form);
  }
  const options = {
    preset: find("preset").value,
    keep_document: find("keep").checked,
    measure: find("measure").checked,
  };
  if (find("ratio").value) options.ratio = Number(find("ratio").value);
  if (!file) return createFromText({ ...options, ...(name && { name }), text });
  for (const [field, value] of Object.entries(options)) form.append(field, String(value));
  form.append("file", file);
  return createFromFile(form);
}
