// Colours: those of the system, or the light or dark ones, which this browser keeps.

import { el } from "./dom.js";

const KEY = "ff-colours";
const CHOICES = ["system", "light", "dark"];

// Storage may be off in a browser; then the choice lasts as long as the page.
function kept() {
  try {
    return localStorage.getItem(KEY);
  } catch {
    return null;
  }
}

function keep(choice) {
  try {
    localStorage.setItem(KEY, choice);
  } catch {
    // See above.
  }
}

function show(choice) {
  if (choice === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = choice;
}

export function themeSwitch() {
  const found = kept();
  const chosen = CHOICES.includes(found) ? found : "system";
  const select = el("select", { "aria-label": "Colours", onchange: () => { show(select.value); keep(select.value); } },
    CHOICES.map((one) => el("option", { value: one, selected: one === chosen }, `${one} colours`)));
  show(chosen);
  return select;
}
