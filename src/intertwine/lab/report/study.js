// What scripts add to a study's report: switches, sliders, tables that sort, filter and save, and commands in a box.
// Everything it shows is in the page already; it asks for nothing from anywhere.
"use strict";
document.documentElement.classList.add("scripted");

const all = (selector, inside = document) => [...inside.querySelectorAll(selector)];
const make = (tag, words = "", attributes = {}) => {
  const made = document.createElement(tag);
  made.textContent = words;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
};
const short = (value) => {
  if (value === null) return "–";
  if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en-US").replace("-", "−");
  return String(Number(value.toPrecision(4))).replace("-", "−");
};
const linkTo = (words, commands) => {
  if (!commands.length) return make("span", words);
  return make("a", words, { href: "#c" + commands[0], "data-c": commands.join(" ") });
};

// Switches: one picture of a family is seen at a time. Where nothing was measured under all of the choices, the one
// just made counts, and the other switches follow.
for (const family of all(".family")) {
  const selects = all(".switches select", family);
  const figures = all(":scope > figure", family);
  const show = (changed) => {
    const chosen = selects.map((select) => select.value);
    const fits = (figure, i) => figure.dataset.choice.split(",")[i] === chosen[i];
    const shared = (figure) => chosen.filter((_, i) => fits(figure, i)).length;
    const possible = figures.filter((figure) => fits(figure, changed)).sort((a, b) => shared(b) - shared(a));
    possible[0].dataset.choice.split(",").forEach((value, i) => (selects[i].value = value));
    for (const figure of figures) figure.hidden = figure !== possible[0];
  };
  selects.forEach((select, i) => select.addEventListener("change", () => show(i)));
  if (selects.length) show(0);
}

// Sliders: a marker on the curves, and the numbers under it behind the names of the curves.
for (const slider of all(".slider")) {
  const curves = JSON.parse(slider.dataset.curves);
  const figure = slider.closest("figure");
  const [input, output] = [slider.querySelector("input"), slider.querySelector("output")];
  const [marker, places] = [figure.querySelector(".marker"), all(".now", figure)];
  const drawn = (tag, attributes) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    return made;
  };
  const move = () => {
    const i = Number(input.value);
    const x = curves.x[i];
    const known = curves.value.map((line) => line[i]);
    const number = (n) => linkTo(short(known[n]), curves.command[n][i]);
    const rings = curves.y.filter((_, n) => known[n] !== null).map((line) => drawn("circle", { cx: x, cy: line[i], r: 7 }));
    marker.replaceChildren(drawn("line", { x1: x, x2: x, y1: curves.top, y2: curves.bottom }), ...rings);
    output.textContent = "t = " + short(curves.alpha[i]);
    input.setAttribute("aria-valuetext", output.textContent);
    places.forEach((place, n) => place.replaceChildren(number(n)));
    if (!places.length) output.append(": ", number(0));
  };
  input.addEventListener("input", move);
  move();
}

// Tables: the rows are held once for the whole page, as columns with each text written once.
const held = JSON.parse(document.getElementById("rows").textContent);
const NUMBERS = new Set(["repeat", "seconds", "peak_mib", "index", "value", "low", "high"]);
const cell = (row, column) => {
  const found = column in held.rows ? held.rows[column][row] : held.tasks[column][held.rows.task[row]];
  if (found === null || NUMBERS.has(column)) return found;
  return column === "command" ? document.querySelector("#c" + found + " code").textContent : held.texts[found];
};
const commandsOf = (row) => [held.tasks.command[held.rows.task[row]]].filter((number) => number !== null);
const plain = (row, column) => {
  const found = cell(row, column);
  if (found === null) return "";
  if (column !== "options") return String(found);
  const word = (value) => (typeof value === "string" ? value : value === null ? "none" : value === true ? "yes" : value === false ? "no" : JSON.stringify(value));
  return Object.entries(JSON.parse(found)).map(([name, value]) => name + "=" + word(value)).join(", ");
};
const save = (rows, name) => {
  const quoted = (value) => {
    const text = value === null ? "" : String(value);
    return /[",\r\n]/.test(text) ? '"' + text.replaceAll('"', '""') + '"' : text;
  };
  const lines = [held.columns, ...rows.map((row) => held.columns.map((column) => cell(row, column)))];
  const text = lines.map((line) => line.map(quoted).join(",") + "\r\n").join("");
  const link = make("a", "", { download: name + ".csv" });
  link.href = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
};
const PAGE = 20;
const every = held.rows.task.map((_, row) => row);
const title = document.title.replace(/[^\w.-]+/g, "-");
for (const button of all(".save-all")) button.addEventListener("click", () => save(every, title));

for (const box of all(".rows")) {
  const own = every.filter((row) => cell(row, "verb") === box.dataset.verb);
  const heads = all("th[data-column]", box);
  const columns = heads.map((head) => head.dataset.column);
  const [body, count, filter] = [box.querySelector("tbody"), box.querySelector("caption small"), box.querySelector("input")];
  const [back, on] = [box.querySelector(".back"), box.querySelector(".on")];
  const texts = new Map();
  const text = (row) => {
    if (!texts.has(row)) texts.set(row, columns.map((column) => plain(row, column)).join(" ").toLowerCase());
    return texts.get(row);
  };
  let [rows, first, by, down] = [own, 0, null, false];
  const filled = (row) => {
    const line = make("tr");
    for (const column of columns) {
      const found = cell(row, column);
      const made = line.appendChild(make("td", "", NUMBERS.has(column) ? { class: "number" } : {}));
      if (column === "value" && found === null) made.append(make("span", "–", { class: "none", title: cell(row, "note") ?? "no value, and no reason was given" }));
      else if (column === "value") made.append(linkTo(short(found), commandsOf(row)));
      else made.textContent = found === null ? "" : NUMBERS.has(column) ? short(found) : plain(row, column);
    }
    return line;
  };
  const draw = () => {
    body.replaceChildren(...rows.slice(first, first + PAGE).map(filled));
    const last = Math.min(first + PAGE, rows.length);
    count.textContent = rows.length ? `${first + 1}–${last} of ${rows.length} rows` : "no row has all these words";
    [back.disabled, on.disabled] = [first === 0, last === rows.length];
  };
  const order = (a, b) => {
    const [x, y] = [cell(a, by), cell(b, by)];
    if (x === null || y === null) return (x === null) - (y === null) || a - b; // without a value: always last
    const sign = NUMBERS.has(by) ? x - y : String(x).localeCompare(String(y), "en", { numeric: true });
    return (down ? -sign : sign) || a - b;
  };
  const choose = () => {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    rows = own.filter((row) => words.every((word) => text(row).includes(word)));
    if (by) rows.sort(order);
    first = 0;
    draw();
  };
  heads.forEach((head) => {
    const button = make("button", head.textContent, { type: "button" });
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      down = by === head.dataset.column && !down;
      by = head.dataset.column;
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      choose();
    });
  });
  filter.addEventListener("input", choose);
  back.addEventListener("click", () => ((first -= PAGE), draw()));
  on.addEventListener("click", () => ((first += PAGE), draw()));
  box.querySelector(".save").addEventListener("click", () => save(rows, title + "-" + box.dataset.verb));
  draw();
}

// Commands: a click on a number shows what made it, instead of leaving for the list at the end.
const box = document.body.appendChild(make("dialog", "", { "aria-label": "What made this number" }));
const copy = async (text, button) => {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const field = box.appendChild(make("textarea", text));
    field.select();
    document.execCommand("copy");
    field.remove();
  }
  button.textContent = "Copied";
};
document.addEventListener("click", (event) => {
  const link = event.target.closest("a[href]");
  const target = link && /^#c(\d+)$/.exec(link.getAttribute("href"));
  if (!target || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  const parts = (link.dataset.c || target[1]).split(" ").flatMap((number) => {
    const text = document.querySelector("#c" + number + " code").textContent;
    const [shown, button] = [make("pre"), make("button", "Copy", { type: "button" })];
    shown.append(make("code", text));
    button.addEventListener("click", () => copy(text, button));
    return [shown, button];
  });
  const close = make("button", "Close", { type: "button" });
  close.addEventListener("click", () => box.close());
  const tools = make("div", "", { class: "tools" });
  tools.append(close);
  box.replaceChildren(make("h3", "What made this number"), ...parts, tools);
  box.showModal();
});
