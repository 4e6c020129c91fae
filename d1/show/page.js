"use strict";
const root = document.documentElement, byId = (id) => document.getElementById(id);
const players = [];
let view = "confidence", active = 0;

/* An element with a class, and text or children. Text of a model is only inserted as text. */
function make(tag, name = "", inside = "") {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (Array.isArray(inside)) made.append(...inside); else made.textContent = inside;
  return made;
}

const UP_DOWN = { ArrowDown: 1, ArrowUp: -1 };
const number = (value) => value.toLocaleString("en");
const bin = (share) => `var(--q${Math.min(4, Math.floor(share * 5))})`;

/* The token at a position after that number of steps: [step, text, log-probability], and of a draft the step that ends
it; none while it is hidden. */
function current(film, i, step) {
  const writes = [...(film.drafts[i] ?? []), [film.at[i], film.tokens[i][1], film.logps[i]]];
  return writes.filter(([at, , , end]) => at <= step && !(step >= end)).at(-1);
}

/* The colour of a position, by confidence, entropy or order. */
function tint(film, i, logp = film.logps[i]) {
  if (view === "confidence") return bin(Math.exp(Math.min(0, logp)));
  if (view === "entropy") return bin(Math.max(0, 1 - film.entropies[i] / 2));
  const share = film.passes > 1 ? (100 * (film.at[i] - 1)) / (film.passes - 1) : 0;
  return `color-mix(in oklch, var(--late) ${share.toFixed(1)}%, var(--early))`;
}

function describe(film, i, step) {
  const where = `position ${i + 1} of ${film.tokens.length}`, now = current(film, i, step);
  if (!now) return [`${where}: still hidden`];
  const [at, label, logp] = now, drafts = (film.drafts[i] ?? []).filter((draft) => draft[0] < at);
  if (film.steps[i] === -3) return [make("code", "", label), ` ${where}, given between two turns`];
  if (film.steps[i] < 0) return [make("code", "", label), ` ${where}, filled without a prediction: the text had ended`];
  const sure = (100 * Math.exp(logp)).toFixed(1), spread = film.entropies[i].toFixed(3);
  const edited = drafts.length ? `; before: ${drafts.map(([when, text]) => `${text} (step ${when})`).join(", ")}` : "";
  const entropy = at === film.at[i] ? `, entropy ${spread} nats` : "";
  const how = `${drafts.length ? "written" : "revealed"} in step ${at} with ${sure}% confidence`;
  return [make("code", "", label), ` ${where}, ${how}${entropy}${edited}`];
}

/* One film's card. `show(step)` shows the state after `step` passes. */
function card(film, seek) {
  const chips = film.tokens.map(([, label], i) => {
    const chip = make("span", "t off", [make("b", "", label)]);
    chip.dataset.position = i;
    chip.setAttribute("role", "button");
    return chip;
  });
  const canvas = make("div", "canvas");
  canvas.setAttribute("role", "group");
  canvas.setAttribute("aria-label", `Canvas of ${film.title}: ${film.tokens.length} tokens`);
  film.tokens.forEach(([gap, , breaks], i) => {
    if (gap && i) canvas.append(" ".repeat(gap));
    canvas.append(chips[i]);
    for (let k = 0; k < breaks; k++) canvas.append(make("br"));
  });

  const svg = (tag, values) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    Object.entries(values).forEach(([name, value]) => made.setAttribute(name, value));
    return made;
  };
  const size = { viewBox: `0 0 ${chips.length} ${film.passes}`, preserveAspectRatio: "none", class: "map" };
  const map = svg("svg", { ...size, role: "img", "aria-label": "Order of reveal: positions from left to right, steps downwards" });
  const thick = Math.max(1, film.passes / 32);
  const marks = film.at.map((at, i) => svg("rect", { x: i, y: Math.min(at - 1, film.passes - thick), width: 1, height: thick }));
  const now = svg("line", { x1: 0, x2: chips.length });
  map.append(...marks, now);
  map.addEventListener("click", (event) => {
    const box = map.getBoundingClientRect();
    seek(Math.ceil(((event.clientY - box.top) / box.height) * film.passes));
  });

  const stats = make("ul", "stats"), hint = "Point at a token or tap it.", detail = make("div", "detail", hint);
  detail.setAttribute("role", "status");
  let step = 0, chosen = -1;
  const tell = (i) => {
    chips[chosen]?.classList.remove("at");
    chips[i].classList.add("at");
    chosen = i;
    detail.classList.add("live");
    detail.replaceChildren(...describe(film, i, step));
  };
  const move = (by) => focus(Math.max(0, Math.min(chips.length - 1, chosen < 0 ? 0 : chosen + by)));
  const focus = (i) => {
    chips.forEach((chip, k) => { chip.tabIndex = k === i ? 0 : -1; });
    chips[i]?.focus();
  };
  if (chips.length) chips.forEach((chip, k) => { chip.tabIndex = k ? -1 : 0; });
  const positionOf = (event) => Number(event.target.closest(".t")?.dataset.position ?? -1);
  for (const name of ["mouseover", "focusin", "click"]) {
    canvas.addEventListener(name, (event) => { if (positionOf(event) >= 0) tell(positionOf(event)); });
  }
  canvas.addEventListener("keydown", (event) => {
    const by = UP_DOWN[event.key];
    if (!by || positionOf(event) < 0) return;
    event.preventDefault();
    move(by);
  });

  const verdict = make("span", film.solved ? "verdict good" : "verdict", film.solved ? "solved" : "not solved");
  const parts = [make("h3", "", film.solved == null ? film.title : [film.title, verdict])];
  if (film.note) parts.push(make("p", "note", film.note));
  const ends = make("p", "caption", [make("span", "", "first token"), make("span", "", "steps from top to bottom"), make("span", "", "last token")]);
  const node = make("article", "film", [...parts, stats, canvas, map, ends, detail]);
  const show = (to) => {
    step = Math.min(to, film.passes);
    chips.forEach((chip, i) => {
      const now = current(film, i, step), seen = Boolean(now), filled = film.steps[i] < 0;
      chip.className = `t${seen ? "" : " off"}${seen && filled ? " filled" : ""}`;
      chip.classList.toggle("new", seen && !filled && now[0] === step && to <= film.passes);
      chip.classList.toggle("fixed", seen && now[0] !== (film.drafts[i]?.[0] ?? now)[0]);
      chip.classList.toggle("at", i === chosen);
      chip.style.setProperty("--c", seen ? tint(film, i, now[2]) : "var(--mask)");
      chip.setAttribute("aria-label", seen ? now[1] || "empty" : "hidden");
      chip.firstChild.textContent = seen ? now[1] : film.tokens[i][1];
      marks[i].style.setProperty("--c", tint(film, i));
      marks[i].classList.toggle("off", film.at[i] > step || filled);
    });
    verdict.hidden = to < film.passes;
    now.setAttribute("y1", step);
    now.setAttribute("y2", step);
    const shown = chips.filter((chip, i) => current(film, i, step)).length;
    const rows = [[`${step}/${film.passes}`, "steps"], [`${shown}/${chips.length}`, "tokens"]];
    if (film.fed.length) rows.push([number(step ? film.fed[step - 1] : 0), "tokens processed"]);
    if (film.seconds.length) rows.push([(step ? film.seconds[step - 1] : 0).toFixed(2), "seconds"]);
    stats.replaceChildren(...rows.map(([value, what]) => make("li", "", [make("b", "", value), make("span", "", ` ${what}`)])));
    if (chosen >= 0) tell(chosen);
  };
  return { node, show, move };
}

function promptOf(film, name) {
  return make("details", "", [make("summary", "", name), make("pre", "", film.prompt)]);
}

/* What the marks in these films mean; only those that occur. */
function marksOf(films) {
  const some = (test) => films.some(test);
  return [
    "Ring: revealed in this step",
    some((film) => film.steps.includes(-3)) && "frame without colour: given between two turns",
    some((film) => film.steps.includes(-1)) && "frame without colour: filled after the end of the text",
    some((film) => film.drafts.some((of) => of.length)) && "wavy underline: corrected",
  ].filter(Boolean).join("; ") + ".";
}

/* A scene: its films side by side under one bar. */
function player(scene, index) {
  const last = Math.max(1, ...scene.films.map((film) => film.passes));
  let step = last, timer = 0;
  const play = make("button", "play", "Play"), range = make("input"), said = make("output");
  Object.assign(range, { type: "range", min: 0, max: last, value: last });
  range.setAttribute("aria-label", "Step");
  const seek = (to) => {
    step = Math.max(0, Math.min(last, to));
    range.value = step;
    said.textContent = `step ${step} of ${last}`;
    range.setAttribute("aria-valuetext", said.textContent);
    cards.forEach((one) => one.show(step));
  };
  const pause = () => { clearInterval(timer); timer = 0; play.textContent = "Play"; };
  const start = () => {
    if (step >= last) seek(0);
    play.textContent = "Pause";
    timer = setInterval(() => { seek(step + 1); if (step >= last) pause(); }, Math.max(60, Math.min(450, 10000 / last)));
  };
  const toggle = () => { active = index; if (timer) pause(); else start(); };
  const jump = (to) => { active = index; pause(); seek(to); };
  const cards = scene.films.map((film) => card(film, jump));
  play.addEventListener("click", toggle);
  range.addEventListener("input", () => jump(Number(range.value)));

  const [first, ...others] = scene.films, alike = others.every((film) => film.prompt === first.prompt);
  const prompts = alike ? [promptOf(first, "Prompt")] : scene.films.map((film) => promptOf(film, `Prompt of ${film.title}`));
  const films = make("div", "films", cards.map((one) => one.node));
  const marks = make("p", "note", marksOf(scene.films)), bar = make("div", "bar", [play, range, said]);
  bar.setAttribute("role", "group");
  bar.setAttribute("aria-label", "Playback");
  const node = make("section", "scene", [...(scene.title ? [make("h2", "", scene.title)] : []), bar, films, marks, ...prompts]);
  node.addEventListener("focusin", () => { active = index; });
  return { node, seek: jump, show: () => seek(step), toggle, start, at: () => step, move: (by) => cards[0].move(by), last };
}

function setView(name) {
  view = name;
  byId(name).checked = true;
  const [from, to] = { confidence: ["unsure", "sure"], entropy: ["2 nats", "0"], order: ["first", "last"] }[name];
  const five = [0, 1, 2, 3, 4].map((i) => {
    const swatch = make("i");
    const mixed = `color-mix(in oklch, var(--late) ${25 * i}%, var(--early))`;
    swatch.style.setProperty("--c", name === "order" ? mixed : `var(--q${i})`);
    return swatch;
  });
  byId("legend").replaceChildren(from, ...five, to);
  players.forEach((one) => one.show());
}

function setTheme(name) {
  root.dataset.theme = name;
  const other = name === "dark" ? "light" : "dark";
  byId("theme").textContent = other;
  byId("theme").setAttribute("aria-label", `${other === "dark" ? "Dark" : "Light"} colours`);
  byId("theme").setAttribute("aria-pressed", String(name === "dark"));
}

/* #step=5&view=order&theme=dark */
function readAddress() {
  const asked = new URLSearchParams(location.hash.slice(1));
  if (["light", "dark"].includes(asked.get("theme"))) setTheme(asked.get("theme"));
  if (["confidence", "entropy", "order"].includes(asked.get("view"))) setView(asked.get("view"));
  if (/^\d+$/.test(asked.get("step") ?? "")) players.forEach((one) => one.seek(Number(asked.get("step"))));
  return asked;
}

const wishesDark = matchMedia("(prefers-color-scheme: dark)");
setTheme(wishesDark.matches ? "dark" : "light");
wishesDark.addEventListener("change", () => setTheme(wishesDark.matches ? "dark" : "light"));
byId("theme").addEventListener("click", () => setTheme(root.dataset.theme === "dark" ? "light" : "dark"));
document.querySelectorAll("[name=view]").forEach((input) => input.addEventListener("change", () => setView(input.value)));
JSON.parse(byId("data").textContent).forEach((scene, index) => players.push(player(scene, index)));
byId("scenes").append(...players.map((one) => one.node));
if (players.length === 1) document.querySelectorAll("#scenes details").forEach((one) => { one.open = one.textContent.length < 1500; });
setView(view);
addEventListener("hashchange", readAddress);
const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
if (!readAddress().has("step") && players.length === 1 && !still) players[0].start();

addEventListener("keydown", (event) => {
  const one = players[active];
  if (!one || event.ctrlKey || event.metaKey || event.altKey || event.target.closest("summary, .views, .ask")) return;
  const to = { ArrowRight: one.at() + 1, ArrowLeft: one.at() - 1, Home: 0, End: one.last }[event.key];
  if (to !== undefined) one.seek(to);
  else if (UP_DOWN[event.key] && event.target.closest(".bar")) one.move(UP_DOWN[event.key]);
  else if (event.key === " " && !event.target.closest("button")) one.toggle();
  else return;
  event.preventDefault();
});
