"use strict";
// The page of `manyhands watch`. It asks once a second for what is new, and draws it. Text from the
// runs is only ever put in as text.

const SECOND = 1000, SLOW = 5000;
const NOT_DRAWN = new Set(["env_steps", "update", "wall_seconds", "episodes", "mean_return"]);
const PHASES = {
  rollout: "p0", optimisation: "p1", gradient: "p1", synchronisation: "p2", logging: "p3",
  starting: "p4", checkpoint: "p5", "waiting for data": "p6", "waiting for room": "p7",
};
const FIRST = ["steps_per_second", "lag", "lag_mean", "queue_fill", "replay_size", "samples_per_insert",
  "policy_loss", "value_loss", "loss"];
const runs = [];
let xName = "env_steps";
const charts = new Map();

const $ = (id) => document.getElementById(id);
const colour = (i) => `r${i % 10}`;
const phaseColour = (name) => PHASES[name] || "p8";
const words = (name) => name.replaceAll("_", " ");

function make(tag, kind = "", text = "") {
  const node = document.createElement(tag);
  if (kind) node.className = kind;
  if (text !== "") node.textContent = text;
  return node;
}

function svg(tag, attributes = {}, text = "") {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== "") node.textContent = text;
  return node;
}

// -- numbers in words -----------------------------------------------------------------------------

function number(value) {
  return Number(value || 0).toLocaleString("en-US", { maximumFractionDigits: 0 });
}

function short(value, largest = Math.abs(value)) {
  const trim = (v) => String(Number(v.toPrecision(4)));
  let text = "";
  for (const [size, letter] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (largest >= (letter === "k" ? 10 * size : size)) {
      text = value === 0 ? "0" : trim(value / size) + letter;
      break;
    }
  }
  return (text || trim(value)).replace("-", "−");
}

function measure(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  const text = size >= 100 ? value.toFixed(1) : size >= 1 ? value.toFixed(2) : value.toPrecision(3);
  return String(text).replace("-", "−");
}

function duration(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  if (whole >= 3600) return `${Math.floor(whole / 3600)}h${String(Math.floor(whole % 3600 / 60)).padStart(2, "0")}m`;
  return whole >= 60 ? `${Math.floor(whole / 60)}m${String(whole % 60).padStart(2, "0")}s` : `${whole}s`;
}

// -- what comes from the server -------------------------------------------------------------------

async function poll() {
  let wait = SECOND;
  try {
    const at = runs.map((r) => `${r.generation},${r.rows},${r.eventCount}`).join(";");
    const answer = await fetch(`news?at=${encodeURIComponent(at)}`, { cache: "no-store" });
    if (!answer.ok) throw new Error(String(answer.status));
    const found = (await answer.json()).runs;
    if (!runs.length) begin(found);
    found.forEach((news, i) => take(runs[i], news));
    draw();
    link("on", "up to date");
    document.body.dataset.polls = String(Number(document.body.dataset.polls || 0) + 1);
    if (found.some((news) => news.more)) wait = 30;
    else if (document.hidden || runs.every((r) => r.state === "ended")) wait = SLOW;
  } catch (error) {
    link("off", "`manyhands watch` does not answer: it has ended, or it is busy");
    wait = SLOW;
  }
  setTimeout(poll, wait);
}

function link(state, text) {
  $("link").className = `link ${state}`;
  $("link").lastElementChild.textContent = text;
}

function begin(found) {
  const paths = found.map((f) => f.path.split("/"));
  let same = 0;  // what all paths begin with says nothing
  while (paths.length > 1 && paths.every((p) => p.length > same + 1 && p[same] === paths[0][same])) same += 1;
  found.forEach((about, i) => {
    const label = paths.length > 1 ? paths[i].slice(same).join("/") : about.path;
    runs.push({ ...about, label, generation: -1, rows: 0, eventCount: 0, columns: {}, seen: [], history: [] });
  });
  const names = new Set(runs.map((r) => r.name));
  const title = names.size === 1 ? runs[0].name : `${runs.length} runs`;
  $("title").textContent = title;
  $("subtitle").textContent = runs.length > 1 ? `${runs.length} runs side by side`
    : `${runs[0].strategy} strategy on the ${runs[0].engine} engine, ${runs[0].workers} ` +
      `worker${runs[0].workers === 1 ? "" : "s"}, seed ${runs[0].seed} · ${runs[0].path}`;
  document.title = `${title} – manyhands watch`;
}

function take(run, news) {
  if (news.first === 0) run.columns = {};
  for (const [name, values] of Object.entries(news.columns)) {
    const before = run.columns[name] || new Array(news.first).fill(null);
    run.columns[name] = before.slice(0, news.first).concat(values);
  }
  if (news.event_count < run.eventCount) run.seen = [];
  run.seen = run.seen.concat(news.events).slice(-60);
  Object.assign(run, { generation: news.generation, rows: news.rows, eventCount: news.event_count,
    latest: news.latest, state: news.state, exit: news.exit, live: news.live });
  if (news.live) {
    run.history = run.history.filter((l) => l.time < news.live.time && l.time > news.live.time - 12);
    run.history.push(news.live);
  }
}

// -- the runs' own cards --------------------------------------------------------------------------

function stateOf(run) {
  if (run.state === "running") return ["running", "running"];
  if (run.state === "silent") return ["silent", "no sign of it"];
  const text = run.exit.startsWith("failed") ? "failed" : run.exit;
  return [run.exit === "solved" ? "solved" : text === "failed" ? "failed" : "", text];
}

function drawRuns() {
  const place = $("runs");
  while (place.children.length < runs.length) {
    const card = make("div", runs.length === 1 ? "run only" : "run");
    const top = make("div", "top");
    top.append(make("i", `swatch ${colour(place.children.length)}`), make("b"), make("span", "state"));
    const list = make("dl");
    for (const name of ["return", "steps", "steps/s", "left"]) {
      const pair = make("div");
      pair.append(make("dt", "", name), make("dd"));
      list.append(pair);
    }
    const bar = make("div", "bar");
    bar.append(make("i", colour(place.children.length)));
    card.append(top, list, bar, make("div", "facts"));
    place.append(card);
  }
  runs.forEach((run, i) => {
    const card = place.children[i], record = run.latest || {}, live = run.live || {};
    const steps = Math.max(record.env_steps || 0, live.env_steps || 0);
    const [kind, text] = stateOf(run);
    card.querySelector("b").textContent = runs.length === 1 ? run.name : run.label;
    card.querySelector("b").title = run.path;
    const state = card.querySelector(".state");
    state.className = `state ${kind}`;
    state.textContent = text;
    const speed = recentSpeed(run);
    const left = run.state !== "running" ? "–" : speed > 0 ? duration((run.steps - steps) / speed) : "?";
    const values = [measure(record.mean_return), short(steps), number(speed), left];
    card.querySelectorAll("dd").forEach((node, k) => { node.textContent = values[k]; });
    card.querySelector(".bar i").style.width = `${Math.min(100, 100 * steps / Math.max(1, run.steps))}%`;
    const facts = [`${number(steps)} of ${number(run.steps)} steps`, `${number(record.episodes)} episodes`,
      duration(live.wall_seconds || record.wall_seconds || 0)];
    if (run.target !== null) facts.push(`target ${run.target}`);
    if (live.restarts) facts.push(`${live.restarts} restarts`);
    if (live.update_age > 5) facts.push(`last update ${duration(live.update_age)} ago`);
    card.querySelector(".facts").textContent = facts.join(" · ");
  });
}

function recentSpeed(run) {
  const steps = run.columns.env_steps || [], times = run.columns.wall_seconds || [];
  const last = steps.length - 1;
  if (last < 0) return 0;
  let first = last;
  while (first > 0 && times[last] - times[first] < 10) first -= 1;
  const seconds = times[last] - (first < last ? times[first] : 0);
  return seconds > 0 ? Math.max(0, (steps[last] - (first < last ? steps[first] : 0)) / seconds) : 0;
}

// -- charts ---------------------------------------------------------------------------------------

function drawCharts(again = false) {
  // Ten runs are a hundred thousand points: only when one of them is new.
  const key = runs.map((r) => `${r.generation},${r.rows},${(r.latest || {}).update}`).join(";");
  if (key === drawCharts.key && !again) return;
  drawCharts.key = key;
  const names = new Set();
  for (const run of runs) for (const name of Object.keys(run.columns)) names.add(name);
  chart("mean_return", $("return"), 320);
  const rest = [...names].filter((n) => !NOT_DRAWN.has(n) && !n.startsWith("seconds/"));
  const place = (name) => (FIRST.includes(name) ? FIRST.indexOf(name) : FIRST.length);
  rest.sort((a, b) => place(a) - place(b));
  const still = [];
  for (const name of rest) {
    const value = constant(name);
    if (value === null || charts.has(name)) chart(name, $("measures"), 190);
    else still.push(`${words(name)} ${short(value)}`);
  }
  $("constant").textContent = still.length ? `Constant so far: ${still.join(", ")}.` : "";
}

function constant(name) {
  const seen = new Set();
  for (const run of runs) {
    for (const value of run.columns[name] || []) if (value !== null) seen.add(value);
    if (seen.size > 1) return null;
  }
  return seen.size ? [...seen][0] : 0;
}

function chart(name, place, height) {
  if (!charts.has(name)) charts.set(name, new Chart(name, place, height));
  charts.get(name).draw();
}

class Chart {
  constructor(name, place, height) {
    Object.assign(this, { name, height, left: 52, right: 8, top: 24, bottom: 34 });
    this.figure = make("figure");
    this.svg = svg("svg", { role: "img" });
    this.svg.append(svg("title", {}, name === "mean_return" ? "Return" : words(name)));
    const title = name === "mean_return" ? "return (mean of the last 100 episodes)" : words(name);
    this.svg.append(svg("text", { class: "name", x: 2, y: 13 }, title));
    this.grid = svg("g");
    this.lines = svg("g", { class: "lines" });
    this.cross = svg("line", { class: "cross", y1: this.top, y2: height - this.bottom });
    this.svg.append(this.grid, this.lines, this.cross);
    this.tip = make("div", "tip");
    this.figure.append(this.svg, this.tip);
    this.figure.addEventListener("pointermove", (event) => this.point(event));
    this.figure.addEventListener("pointerleave", () => this.hide());
    place.append(this.figure);
  }

  draw() {
    this.width = Math.max(200, this.figure.clientWidth || 360);  // one unit is one pixel
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
    this.series = runs.map((run) => this.points(run));
    const all = this.series.flat();
    this.figure.hidden = !all.length && this.name !== "mean_return";
    const ys = all.map((p) => p[1]);
    this.log = this.name !== "mean_return" && spansDecades(ys);
    const targets = this.name === "mean_return" ? [...new Set(runs.map((r) => r.target).filter((t) => t !== null))] : [];
    const extent = [...ys, ...targets];
    let low = extent.length ? Math.min(...extent) : 0, high = extent.length ? Math.max(...extent) : 1;
    if (this.log) [low, high] = [Math.log10(low), Math.log10(high)];
    if (low === high) [low, high] = [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
    const pad = (high - low) * 0.05;
    this.y = [low - pad, high + pad];
    this.x = [0, Math.max(1e-9, ...all.map((p) => p[0]))];
    this.grid.replaceChildren();
    this.axes();
    for (const target of targets) {
      const y = this.at(0, target)[1];
      this.grid.append(svg("line", { class: "target", x1: this.left, x2: this.width - this.right, y1: y, y2: y }),
        svg("text", { x: this.left + 6, y: y - 5 }, `target ${target}`));
    }
    if (!all.length) {
      this.grid.append(svg("text", { x: this.width / 2, y: this.height / 2, "text-anchor": "middle" },
        "no episode has finished"));
    }
    while (this.lines.children.length < runs.length) {
      this.lines.append(svg("path", { class: colour(this.lines.children.length) }));
    }
    this.series.forEach((points, i) => {
      const d = points.map((p, k) => `${k ? "L" : "M"}${this.at(...p).map((v) => v.toFixed(1)).join(" ")}`);
      const single = points.length === 1 ? "h0.01" : "";
      this.lines.children[i].setAttribute("d", d.join("") + single);
      this.lines.children[i].dataset.points = String(points.length);
    });
  }

  points(run) {
    const xs = run.columns[xName] || [], ys = run.columns[this.name] || [];
    const found = [];
    for (let i = 0; i < ys.length; i += 1) {
      if (ys[i] !== null && xs[i] !== null && xs[i] !== undefined) found.push([xs[i], ys[i]]);
    }
    const record = run.latest || {};  // newer than the last point, where one stands for many records
    const last = found.length ? found[found.length - 1][0] : -1;
    if (typeof record[this.name] === "number" && record[xName] > last) found.push([record[xName], record[this.name]]);
    return found;
  }

  at(x, y) {
    const value = this.log ? Math.log10(y) : y;
    const w = this.width - this.left - this.right, h = this.height - this.top - this.bottom;
    return [this.left + w * (x - this.x[0]) / (this.x[1] - this.x[0]),
      this.top + h * (1 - (value - this.y[0]) / (this.y[1] - this.y[0]))];
  }

  axes() {
    const bottom = this.height - this.bottom, end = this.width - this.right;
    const yTicks = this.log ? decades(this.y) : ticks(this.y, this.height > 250 ? 6 : 4);
    const most = Math.max(...yTicks.map(Math.abs), 0);
    for (const value of yTicks) {
      const y = this.at(0, value)[1];
      this.grid.append(svg("line", { class: "gridline", x1: this.left, x2: end, y1: y, y2: y }),
        svg("text", { x: this.left - 6, y: y + 4, "text-anchor": "end" }, this.log ? power(value) : short(value, most)));
    }
    for (const value of ticks(this.x, this.width > 600 ? 8 : 4)) {
      const [x] = this.at(value, this.log ? 1 : 0);
      this.grid.append(svg("text", { x, y: bottom + 14, "text-anchor": x > end - 14 ? "end" : "middle" },
        xName === "env_steps" ? short(value, this.x[1]) : duration(value)));
    }
    this.grid.append(svg("line", { class: "axis", x1: this.left, x2: end, y1: bottom, y2: bottom }),
      svg("text", { x: (this.left + end) / 2, y: this.height - 4, "text-anchor": "middle" },
        xName === "env_steps" ? "environment steps" : "time"));
  }

  point(event) {
    const box = this.svg.getBoundingClientRect();
    const px = (event.clientX - box.left) * this.width / box.width;
    if (px < this.left || !this.series || !this.series.some((s) => s.length)) return this.hide();
    const x = this.x[0] + (px - this.left) / (this.width - this.left - this.right) * (this.x[1] - this.x[0]);
    this.tip.replaceChildren(make("div", "soft", xName === "env_steps" ? `${number(x)} steps` : duration(x)));
    this.series.forEach((points, i) => {
      const near = points.reduce((best, p) => (best === null || Math.abs(p[0] - x) < Math.abs(best[0] - x) ? p : best), null);
      if (near === null) return;
      const row = make("div");
      const mark = make("i", `swatch ${colour(i)}`);
      mark.style.display = "inline-block";
      mark.style.marginRight = ".4rem";
      row.append(mark, document.createTextNode(`${measure(near[1])}${runs.length > 1 ? ` ${runs[i].label}` : ""}`));
      this.tip.append(row);
    });
    this.cross.setAttribute("x1", px);
    this.cross.setAttribute("x2", px);
    this.cross.style.visibility = this.tip.style.visibility = "visible";
    const share = px / this.width;
    this.tip.style.left = share < 0.6 ? `calc(${100 * share}% + 12px)` : "auto";
    this.tip.style.right = share < 0.6 ? "auto" : `calc(${100 * (1 - share)}% + 12px)`;
    return undefined;
  }

  hide() {
    this.cross.style.visibility = this.tip.style.visibility = "hidden";
  }
}

function spansDecades(values) {
  if (values.length < 2) return false;
  const sorted = [...values].sort((a, b) => a - b);
  if (sorted[0] <= 0) return false;
  const part = (share) => sorted[Math.floor(share * (sorted.length - 1))];
  return part(0.95) > 30 * part(0.05) || sorted[sorted.length - 1] > 30 * part(0.5);
}

function ticks([low, high], count) {
  const raw = (high - low) / count, size = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * size).find((s) => s >= raw) || size;
  const found = [];
  for (let k = Math.ceil(low / step); k * step <= high + step * 1e-9; k += 1) found.push(Number((k * step).toPrecision(12)));
  return found;
}

function decades([low, high]) {
  const step = Math.max(1, Math.ceil((high - low) / 5));
  const found = [];
  for (let k = Math.ceil(low); k <= high; k += step) found.push(10 ** k);
  return found;
}

function power(value) {
  const exponent = Math.round(Math.log10(value));
  if (exponent > -3 && exponent < 4) return short(value);
  return `10${[...String(exponent)].map((c) => (c === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[Number(c)])).join("")}`;
}

// -- workers and events ---------------------------------------------------------------------------

function drawWorkers() {
  const place = $("workers"), phases = new Set();
  while (place.children.length < runs.length) {
    const details = make("details");
    details.open = runs.length <= 2;
    const summary = make("summary");
    summary.append(make("i", `swatch ${colour(place.children.length)}`), make("span"));
    details.append(summary, make("div", "scroll"));
    place.append(details);
  }
  runs.forEach((run, i) => {
    const details = place.children[i], peers = (run.live && run.live.workers) || [];
    const alive = peers.filter((p) => p.state === "running" || p.state === "waiting").length;
    const many = `${run.workers} worker${run.workers === 1 ? "" : "s"}`;
    const about = run.state === "ended" ? `${many}; the run has ended`
      : peers.length ? `${alive} of ${many} at work` : `${many}; nothing is known of them yet`;
    details.querySelector("summary span").textContent = `${run.label}: ${about}`;
    const table = make("table"), head = make("tr");
    for (const name of ["worker", "state", "heartbeat", "time, last seconds", "where"]) head.append(make("th", "", name));
    const rows = peers.map((peer) => workerRow(run, peer, phases));
    if (rows.length) table.append(head, ...rows);
    details.lastElementChild.replaceChildren(table);
  });
  $("phases").replaceChildren(...[...phases].map((name) => {
    const item = make("li");
    item.append(make("i", phaseColour(name)), document.createTextNode(name));
    return item;
  }));
}

function workerRow(run, peer, phases) {
  const row = make("tr"), age = peer.beat_age;
  const beat = age === undefined || age === null ? "–" : `${age.toFixed(1)} s ago`;
  const bar = make("div", "bar time");
  const seconds = recentPhases(run, peer);
  const total = Object.values(seconds).reduce((a, b) => a + b, 0);
  for (const [name, value] of Object.entries(seconds)) {
    if (value <= 0) continue;
    phases.add(name);
    const part = make("i", phaseColour(name));
    part.style.width = `${100 * value / total}%`;
    part.title = `${name} ${Math.round(100 * value / total)}%`;
    bar.append(part);
  }
  const wide = make("td", "wide");
  wide.append(bar);
  row.append(make("td", "", `${peer.rank}${peer.role && peer.role !== "worker" ? ` ${peer.role}` : ""}`),
    make("td", ["failed", "dead"].includes(peer.state) ? "late" : "", peer.state),
    make("td", age > 3 ? "late" : "", beat), wide, make("td", "soft", peer.where || ""));
  return row;
}

function recentPhases(run, peer) {
  const then = run.history.length > 1 ? run.history[0].workers.find((p) => p.rank === peer.rank) : null;
  const found = {};
  for (const [name, value] of Object.entries(peer.phases || {})) {
    found[name] = Math.max(0, value - ((then && then.phases[name]) || 0));
  }
  return Object.values(found).some((v) => v > 0) ? found : peer.phases || {};
}

function drawEvents() {
  const all = runs.flatMap((run, i) => run.seen.map((event) => ({ event, run, i })));
  all.sort((a, b) => (b.event.time || 0) - (a.event.time || 0));
  const key = JSON.stringify([all.length, all[0] && all[0].event, runs.map((r) => r.eventCount)]);
  if (key === drawEvents.key) return;
  drawEvents.key = key;
  $("events").replaceChildren(...all.slice(0, 60).map(({ event, run, i }) => {
    const { event: kind, time, wall_seconds: seconds, ...facts } = event;
    const row = make("tr", ["fault", "checkpoint_failed"].includes(kind) ? "fault" : "");
    const name = make("td");
    if (runs.length > 1) {
      name.append(make("i", `swatch ${colour(i)}`), document.createTextNode(` ${run.label}`));
      name.firstElementChild.style.display = "inline-block";
    }
    const said = Object.entries(facts).map(([k, v]) => `${words(k)} ${typeof v === "string" ? v : JSON.stringify(v)}`);
    row.append(make("td", "soft", time ? new Date(1000 * time).toLocaleTimeString() : ""),
      make("td", "", words(String(kind))), ...(runs.length > 1 ? [name] : []),
      make("td", "soft", said.join(", ")));
    return row;
  }));
}

function draw(again = false) {
  drawRuns();
  drawCharts(again);
  drawWorkers();
  drawEvents();
}

for (const button of document.querySelectorAll("button[data-x]")) {
  button.addEventListener("click", () => {
    xName = button.dataset.x;
    for (const other of document.querySelectorAll("button[data-x]")) {
      other.setAttribute("aria-pressed", String(other === button));
    }
    draw(true);
  });
}
window.addEventListener("resize", () => { if (runs.length) drawCharts(true); });
poll();
