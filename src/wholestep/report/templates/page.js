"use strict";
const read = (id) => JSON.parse(document.getElementById(id).textContent);
const three = (value) => (value >= 999.5 ? Math.round(value).toLocaleString("en") : value.toPrecision(3));
// as graph.text.seconds
const showUs = (us) => (us >= 999500 ? three(us / 1e6) + " s" : us >= 999.5 ? three(us / 1e3) + " ms" : (us >= 5e-4 ? Number(us.toPrecision(3)) : 0) + " us");
function showBytes(size) {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (size < 1000) return size.toFixed(unit === "B" ? 0 : 1) + " " + unit;
    size /= 1000;
  }
  return size.toFixed(1) + " TB";
}

function sortable(table) {
  const heads = [...table.tHead.rows[0].cells];
  const value = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value);
  };
  heads.forEach((head, column) => head.firstElementChild.addEventListener("click", () => {
    const number = head.classList.contains("num");
    const down = head.ariaSort ? head.ariaSort === "ascending" : number;
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const order = (a, b) => (number ? value(a, column) - value(b, column) : value(a, column).localeCompare(value(b, column)));
    const rows = [...table.tBodies[0].rows].sort((a, b) => (down ? order(b, a) : order(a, b)));
    table.tBodies[0].append(...rows);
  }));
}

function memory() {
  const chart = document.getElementById("chart");
  if (!chart) return;  // a pipeline has a table of its stages instead
  const cursor = chart.querySelector(".cursor");
  const said = document.getElementById("chart-said");
  const { bytes, step } = read("held");
  let at = 0;
  const show = (column) => {
    at = Math.max(0, Math.min(bytes.length - 1, column));
    cursor.hidden = false;
    cursor.style.left = ((at + 0.5) / bytes.length) * 100 + "%";
    said.textContent = showUs(((at + 0.5) / bytes.length) * step) + ": " + showBytes(bytes[at]);
  };
  chart.addEventListener("pointermove", (event) => {
    const box = chart.getBoundingClientRect();
    show(Math.floor(((event.clientX - box.left) / box.width) * bytes.length));
  });
  chart.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: at - 1, ArrowRight: at + 1, PageUp: at - 40, PageDown: at + 40, Home: 0, End: bytes.length };
    if (!(event.key in moves)) return;
    event.preventDefault();
    show(moves[event.key]);
  });
}

function timeline() {
  const canvas = document.getElementById("timeline");
  const said = document.getElementById("timeline-said");
  const pen = canvas.getContext("2d");
  const { step, lanes, words } = read("lanes");
  const HEIGHT = 30, TOP = 22, LABEL = 19;
  const shades = {};
  let from = 0, to = step || 1, lane = 0, span = -1, waiting = false;
  canvas.style.height = TOP + lanes.length * (HEIGHT + LABEL) + 8 + "px";

  const colours = () => {
    const style = getComputedStyle(document.documentElement);
    for (const name of ["ink", "faint", "line", "accent", "forward", "backward", "update", "paper"]) {
      shades[name] = style.getPropertyValue("--" + name).trim();
    }
  };
  const x = (us) => ((us - from) / (to - from)) * canvas.clientWidth;
  const y = (number) => TOP + number * (HEIGHT + LABEL) + LABEL;
  const colour = (one, i) => (one.kind === "compute" ? shades[words[one.phase[i]]] || shades.backward : shades.accent);

  // The first span of a lane that ends after `us`: starts ascend, and so do ends, as one stream does one thing at a time.
  const after = (one, us) => {
    let low = 0, high = one.start.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (one.start[middle] + one.us[middle] <= us) low = middle + 1; else high = middle;
    }
    return low;
  };

  function scale(width) {
    const rough = (to - from) / Math.max(2, width / 110);
    const power = 10 ** Math.floor(Math.log10(rough));
    const unit = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
    pen.fillStyle = shades.faint;
    pen.strokeStyle = shades.line;
    for (let us = Math.ceil(from / unit) * unit; us <= to; us += unit) {
      const at = Math.round(x(us)) + 0.5;
      pen.beginPath(); pen.moveTo(at, 0); pen.lineTo(at, canvas.clientHeight); pen.stroke();
      pen.fillText(showUs(us), at + 4, 13);
    }
  }

  function drawLane(one, number, width) {
    pen.fillStyle = shades.faint;
    pen.fillText(one.title, 4, y(number) - 5);
    let drawn = -1;
    for (let i = after(one, from); i < one.start.length && one.start[i] < to; i++) {
      const left = Math.max(x(one.start[i]), 0), right = Math.min(x(one.start[i] + one.us[i]), width);
      if (right <= drawn) continue; // under a pixel that is filled
      pen.fillStyle = colour(one, i);
      const wide = right - left;
      pen.fillRect(left, y(number), wide > 3 ? wide - 0.75 : Math.max(wide, 1), HEIGHT);
      drawn = Math.max(right, Math.floor(left) + 1);
      const name = words[one.op[i]];
      if (wide > 24 && pen.measureText(name).width < wide - 8) {
        pen.fillStyle = shades.paper;
        if (one.kind === "compute" && words[one.phase[i]] === "forward") pen.fillStyle = shades.ink;
        pen.fillText(name, left + 4, y(number) + HEIGHT / 2 + 4);
      }
    }
  }

  function draw() {
    waiting = false;
    const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
    if (canvas.width !== Math.round(width * ratio)) canvas.width = Math.round(width * ratio);
    if (canvas.height !== Math.round(height * ratio)) canvas.height = Math.round(height * ratio);
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = "12px system-ui, sans-serif";
    scale(width);
    lanes.forEach((one, number) => drawLane(one, number, width));
    if (span >= 0) {
      const one = lanes[lane];
      pen.strokeStyle = shades.ink;
      pen.lineWidth = 2;
      pen.strokeRect(x(one.start[span]), y(lane) - 1, Math.max(2, x(one.start[span] + one.us[span]) - x(one.start[span])), HEIGHT + 2);
      pen.lineWidth = 1;
    }
  }
  const soon = () => { if (!waiting) { waiting = true; requestAnimationFrame(draw); } };

  function select(number, i) {
    lane = number; span = i;
    const one = lanes[lane];
    const parts = [
      `${one.title}: ${words[one.op[i]]} %${one.node[i]}`, `${showUs(one.us[i])} from ${showUs(one.start[i])}`,
      words[one.phase[i]], words[one.module[i]], one.bytes[i] ? showBytes(one.bytes[i]) : "",
    ];
    said.textContent = parts.filter(Boolean).join(" · ");
    soon();
  }
  function view(start, end) {
    const wide = Math.min(Math.max(end - start, 0.01), step || 1);
    from = Math.max(0, Math.min(start, (step || 1) - wide));
    to = from + wide;
    soon();
  }
  const zoom = (factor, about = (from + to) / 2) => view(about - (about - from) * factor, about + (to - about) * factor);
  function reach(i) {
    const one = lanes[lane];
    if (!one.start.length) return;
    i = Math.max(0, Math.min(one.start.length - 1, i));
    select(lane, i);
    const middle = one.start[i] + one.us[i] / 2;
    if (one.start[i] + one.us[i] > to || one.start[i] < from) view(middle - (to - from) / 2, middle + (to - from) / 2);
  }
  function another(by) {
    const now = span >= 0 ? lanes[lane].start[span] + lanes[lane].us[span] / 2 : from;
    for (let next = lane + by; next >= 0 && next < lanes.length; next += by) {
      if (lanes[next].start.length) { lane = next; reach(after(lanes[next], now)); return; }
    }
  }
  function found(event) {
    const box = canvas.getBoundingClientRect();
    const us = from + ((event.clientX - box.left) / box.width) * (to - from), slack = ((to - from) / box.width) * 2;
    const number = Math.floor((event.clientY - box.top - TOP) / (HEIGHT + LABEL));
    if (number < 0 || number >= lanes.length) return;
    const one = lanes[number], i = after(one, us - slack);
    if (i < one.start.length && one.start[i] <= us + slack) select(number, i);
  }

  const keys = {
    ArrowLeft: () => reach(span < 0 ? after(lanes[lane], from) : span - 1),
    ArrowRight: () => reach(span < 0 ? after(lanes[lane], from) : span + 1),
    ArrowUp: () => another(-1), ArrowDown: () => another(1),
    "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), "0": () => view(0, step),
    Enter: () => { if (span >= 0) { const one = lanes[lane]; view(one.start[span] - one.us[span] / 2, one.start[span] + 1.5 * one.us[span]); } },
    Home: () => reach(0), End: () => reach(Infinity),
  };
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in keys)) return;
    event.preventDefault();
    const by = (to - from) / 4;
    if (event.shiftKey && event.key === "ArrowLeft") view(from - by, to - by);
    else if (event.shiftKey && event.key === "ArrowRight") view(from + by, to + by);
    else keys[event.key]();
  });
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey && document.activeElement !== canvas) return;
    event.preventDefault();
    const box = canvas.getBoundingClientRect();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, from + ((event.clientX - box.left) / box.width) * (to - from));
  }, { passive: false });
  let held = null;
  canvas.addEventListener("pointerdown", (event) => { held = event.clientX; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointerup", () => { held = null; });
  canvas.addEventListener("pointercancel", () => { held = null; });
  canvas.addEventListener("pointermove", (event) => {
    if (held === null) return found(event);
    const us = ((held - event.clientX) / canvas.clientWidth) * (to - from);
    held = event.clientX;
    view(from + us, to + us);
  });
  const buttons = { in: () => zoom(0.5), out: () => zoom(2), whole: () => view(0, step) };
  for (const button of document.querySelectorAll("[data-do]")) button.addEventListener("click", buttons[button.dataset.do]);
  new ResizeObserver(soon).observe(canvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { colours(); soon(); });
  colours();
  draw();
  canvas.dataset.spans = lanes.reduce((sum, one) => sum + one.start.length, 0);
}

document.querySelectorAll("table.sortable").forEach(sortable);
for (const button of document.querySelectorAll("[data-tree]")) {
  button.addEventListener("click", () => {
    document.querySelectorAll(".tree details").forEach((one) => { one.open = button.dataset.tree === "open"; });
  });
}
memory();
timeline();
