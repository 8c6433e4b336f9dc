"use strict";
(() => {
  const STEP = 100;
  const body = document.querySelector("#list tbody");
  if (!body) return;
  const rows = [...body.rows];
  const controls = document.querySelector("#controls");
  const shown = document.querySelector("#shown");
  const more = document.querySelector("#more");
  const inputs = [...controls.querySelectorAll("[data-filter]")];
  let limit = STEP;

  const tests = {
    observed: (row, value) => row.dataset.observed === value,
    proposed: (row, value) => row.dataset.proposed === value,
    contradicting: (row, value) => Number(row.dataset.contradicting) >= Number(value),
    moved: (row, value) => row.dataset.moved === value,
    text: (row, value) => row.dataset.text.includes(value.trim().toLowerCase()),
  };

  function draw() {
    const active = inputs.filter((input) => input.value.trim() !== "");
    let matching = 0;
    for (const row of rows) {
      const fits = active.every((input) => tests[input.dataset.filter](row, input.value));
      row.hidden = !fits || ++matching > limit;
    }
    shown.textContent = `${Math.min(matching, limit)} of ${matching} matching rows shown, ${rows.length} listed`;
    more.hidden = matching <= limit;
  }

  function sort(button) {
    const header = button.closest("th");
    const down = header.getAttribute("aria-sort") === "ascending";
    for (const other of header.parentElement.cells) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", down ? "descending" : "ascending");
    const key = button.dataset.sort;
    const number = button.dataset.kind === "number";
    const compare = number
      ? (a, b) => Number(a.dataset[key]) - Number(b.dataset[key])
      : (a, b) => a.dataset[key].localeCompare(b.dataset[key]);
    rows.sort((a, b) => (down ? -1 : 1) * compare(a, b) || Number(a.dataset.rank) - Number(b.dataset.rank));
    body.append(...rows);
    draw();
  }

  for (const input of inputs) {
    input.addEventListener("input", () => { limit = STEP; draw(); });
  }
  for (const button of document.querySelectorAll("#list button[data-sort]")) {
    button.disabled = false;
    button.addEventListener("click", () => sort(button));
  }
  more.addEventListener("click", () => { limit += STEP; draw(); });
  body.addEventListener("click", (event) => {
    const look = event.target.closest("button.look");
    if (look) look.setAttribute("aria-pressed", look.getAttribute("aria-pressed") === "true" ? "false" : "true");
  });
  controls.hidden = false;
  draw();
})();
