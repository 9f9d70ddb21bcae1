// A page that is drawn again has new elements. The focus, and what was typed, go to the new element of the same name.

let held = null;

export function watchFocus(main) {
  main.addEventListener("focusin", (event) => { held = event.target; });
  // A press beside everything takes the focus away, and no element says so.
  document.addEventListener("pointerdown", (event) => {
    held = main.contains(event.target) ? event.target.closest("input, select, textarea, button, a, [tabindex='0']") : null;
  });
}

export function restoreFocus(main) {
  if (!held || held.isConnected || document.activeElement !== document.body) return;
  const same = [...main.querySelectorAll(held.tagName)].find((one) => nameOf(one) === nameOf(held));
  if (!same) return;
  if (same.tagName === "INPUT" && held.value !== held.defaultValue) same.value = held.value;
  same.focus({ preventScroll: true });
}

// In a table, the first cell of the row is part of it: rows have buttons of the same text.
function nameOf(element) {
  const name = element.getAttribute("aria-label") ?? element.getAttribute("href") ?? element.textContent;
  return JSON.stringify([element.closest("tr")?.cells[0]?.textContent, element.tagName === "TR" ? "" : name]);
}
