"use strict";
(() => {
  const all = (selector, from = document) => [...from.querySelectorAll(selector)];
  const known = JSON.parse(document.getElementById("data").textContent);
  const figures = all(".figure"), rows = all(".row"), cells = all(".rank");
  const detail = document.getElementById("detail"), hint = detail.firstElementChild;
  let current = 0, lit = null;
  document.documentElement.classList.add("js");

  const make = (name, text, kind) => {
    const node = document.createElement(name);
    if (text !== undefined) node.textContent = text;
    if (kind) node.className = kind;
    return node;
  };
  const paint = (node, fill) => {
    node.style.backgroundColor = fill === null ? "" : fill < 0 ? "var(--whole)" : `var(--c${fill % 8})`;
    node.dataset.hatch = fill === null || fill < 0 ? 0 : Math.floor(fill / 8);
  };

  function select(number) {
    current = number;
    figures.forEach((figure, i) => { figure.hidden = i !== number; });
    rows.forEach((row) => {
      if (Number(row.dataset.f) === number) row.setAttribute("aria-current", "true");
      else row.removeAttribute("aria-current");
    });
    const { cells: held, fills } = known[number];
    cells.forEach((cell) => {
      const part = held[Number(cell.dataset.c)];
      const fill = part === null ? null : fills[part];
      cell.className = part === null ? "rank" : fill < 0 ? "rank all" : "rank held";
      paint(cell, fill);
    });
    light(null);
  }

  function light(part, rank) {
    lit = part;
    const figure = figures[current], map = figure.querySelector(".map");
    if (map) map.classList.toggle("lit", part !== null && known[current].parts.length > 1);
    all(".part", figure).forEach((node) => node.classList.toggle("on", Number(node.dataset.p) === part));
    cells.forEach((cell) => {
      const held = known[current].cells[Number(cell.dataset.c)];
      cell.classList.toggle("on", part !== null && (rank === undefined ? held === part : cell === rank));
    });
    if (part === null) return detail.replaceChildren(hint);
    detail.replaceChildren(...about(known[current], part, rank));
  }

  function about(figure, number, rank) {
    const part = figure.parts[number], title = make("h3"), swatch = make("i", undefined, "swatch");
    paint(swatch, figure.fills[number]);
    title.append(swatch);
    if (rank) title.append(make("b", `rank ${rank.textContent}`));
    for (const text of [part.at, part.ranks, part.device, part.bytes, `${part.numel} elements`]) {
      if (text) title.append(make("span", text));
    }
    const table = make("table"), head = make("tr");
    head.append(make("th", ""), ...figure.dims.map((dim) => make("th", dim)));
    table.append(head);
    part.boxes.forEach(([offsets, sizes]) => {
      for (const [name, values] of [["offset", offsets], ["size", sizes]]) {
        const line = make("tr");
        line.append(make("td", name), ...values.map((value) => make("td", String(value))));
        table.append(line);
      }
    });
    const found = [title];
    if (part.boxes.length && figure.dims.length) found.push(table);
    if (!part.boxes.length) found.push(make("p", "holds nothing", "note"));
    if (part.count > part.boxes.length) found.push(make("p", `and ${part.count - part.boxes.length} more boxes`, "note"));
    return found;
  }

  figures.forEach((figure) => {
    const parts = all(".part", figure), map = figure.querySelector(".map");
    if (!map) return;
    parts.forEach((node) => {
      node.addEventListener("pointerenter", () => light(Number(node.dataset.p)));
      node.addEventListener("click", () => light(Number(node.dataset.p)));
    });
    map.addEventListener("focus", () => { if (map.matches(":focus-visible")) light(lit === null ? Number(parts[0].dataset.p) : lit); });
    map.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (event.key === "Escape") return light(null);
      if (!step) return;
      event.preventDefault();
      const at = parts.findIndex((node) => Number(node.dataset.p) === lit);
      light(Number(parts[(at + step + parts.length) % parts.length].dataset.p));
    });
  });
  cells.forEach((cell) => cell.addEventListener("pointerenter", () => {
    const part = known[current].cells[Number(cell.dataset.c)];
    if (part !== null) light(part, cell);
  }));
  rows.forEach((row) => row.addEventListener("click", (event) => {
    event.preventDefault();
    select(Number(row.dataset.f));
    history.replaceState(null, "", `#f${row.dataset.f}`);
    if (matchMedia("(max-width: 1060px)").matches) document.getElementById("stage").scrollIntoView({ block: "start" });
  }));

  // All names that a folded one stands for: {0..31} is a run of numbers, {a,b} are words.
  function names(pattern) {
    const words = pattern.split(/\{([^{}]*)\}/), found = [""];
    return words.reduce((made, word, i) => {
      const choices = i % 2 ? word.split(/, ?/).flatMap((choice) => {
        const run = /^(\d+)\.\.(\d+)$/.exec(choice);
        return run ? Array.from({ length: run[2] - run[1] + 1 }, (_, n) => String(Number(run[1]) + n)) : [choice];
      }) : [word];
      return made.flatMap((start) => choices.map((choice) => start + choice));
    }, found);
  }
  const search = document.getElementById("search");
  if (search) {
    const status = document.getElementById("found"), texts = new Map();
    search.parentElement.hidden = false;
    search.addEventListener("input", () => {
      const word = search.value.trim().toLowerCase();
      const pattern = new RegExp(word.replace(/[.+?^${}()|[\]\\]/g, "\\$&").replace(/\*+/g, "[^\n]*"));
      let count = 0;
      rows.forEach((row) => {
        if (!texts.has(row)) texts.set(row, `${row.dataset.name}\n${names(row.dataset.name).join("\n")}`.toLowerCase());
        const fits = !word || pattern.test(texts.get(row));
        row.parentElement.hidden = !fits;
        count += fits;
      });
      all(".tree details").reverse().forEach((node) => { node.parentElement.hidden = !node.querySelector("li:not([hidden]) > .row"); if (word) node.open = true; });
      status.textContent = word ? `${count} of ${rows.length}` : "";
    });
  }
  const asked = /^#f(\d+)$/.exec(location.hash);
  select(asked && Number(asked[1]) < figures.length ? Number(asked[1]) : Number(document.querySelector("main").dataset.start));
})();
