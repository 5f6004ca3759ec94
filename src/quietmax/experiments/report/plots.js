"use strict";
(() => {
  const panels = JSON.parse(document.getElementById("data").textContent);
  const holder = document.getElementById("panels");
  const names = "http://www.w3.org/2000/svg";
  // A narrow screen gets a smaller drawing, so that its letters stay readable.
  const narrow = window.innerWidth < 620;
  const size = { width: narrow ? 350 : 520, height: narrow ? 260 : 320, left: 52, right: 22, top: 10, bottom: 40 };

  const made = (tag, attributes, parent) => {
    const node = document.createElementNS(names, tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    if (parent) parent.appendChild(node);
    return node;
  };
  const text = (value, x, y, anchor, parent) => {
    const node = made("text", { x, y, "text-anchor": anchor }, parent);
    node.textContent = value;
    return node;
  };
  const short = (value) => Number(value.toPrecision(3)).toString();

  const steps = (low, high) => {
    const raw = (high - low) / 6;
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= raw);
    const marks = [];
    for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + 1e-9; at += step) marks.push(Number(at.toFixed(6)));
    return marks;
  };

  const draw = (panel) => {
    const figure = document.createElement("figure");
    figure.innerHTML = "<figcaption></figcaption>";
    figure.firstChild.textContent = panel.title;
    const svg = made("svg", { viewBox: `0 0 ${size.width} ${size.height}`, role: "img", "aria-label": panel.title }, figure);
    const points = panel.lines.flatMap((line) => line.points);
    const epsilons = [...new Set(points.map((point) => point[0]))].sort((a, b) => a - b);
    const values = points.flatMap(([, value, spread]) => [value - (spread || 0), value + (spread || 0)]);
    if (panel.level !== null) values.push(panel.level);
    let low = Math.min(0, ...values), high = Math.max(...values);
    if (panel.axis === "test accuracy") { low = Math.max(0, Math.min(...values)); high = Math.min(1, high); }
    const room = (high - low || 0.1) * 0.05;
    high += room;
    low -= low === 0 ? 0 : room;
    const first = Math.log10(epsilons[0]), last = Math.log10(epsilons[epsilons.length - 1]);
    const span = last - first || 1;
    const x = (epsilon) => size.left + ((Math.log10(epsilon) - first) / span) * (size.width - size.left - size.right);
    const y = (value) => size.height - size.bottom - ((value - low) / (high - low)) * (size.height - size.top - size.bottom);

    for (const mark of steps(low, high)) {
      made("line", { x1: size.left, x2: size.width - size.right, y1: y(mark), y2: y(mark), stroke: "#e8ebee" }, svg);
      text(short(mark), size.left - 6, y(mark) + 4, "end", svg);
    }
    const whole = (each) => Math.abs(Math.log10(each) - Math.round(Math.log10(each))) < 1e-9;
    const shown = span > 2.5 ? epsilons.filter(whole) : epsilons;
    let edge = -Infinity;
    for (const epsilon of shown) {
      made("line", { x1: x(epsilon), x2: x(epsilon), y1: size.height - size.bottom, y2: size.height - size.bottom + 4, stroke: "#9aa4ad" }, svg);
      if (x(epsilon) - edge < 30) continue;
      edge = x(epsilon);
      text(short(epsilon), edge, size.height - size.bottom + 17, "middle", svg);
    }
    made("line", { x1: size.left, x2: size.width - size.right, y1: size.height - size.bottom, y2: size.height - size.bottom, stroke: "#9aa4ad" }, svg);
    text("epsilon (log scale)", (size.left + size.width - size.right) / 2, size.height - 4, "middle", svg);
    const label = text(panel.axis, 0, 0, "middle", svg);
    label.setAttribute("transform", `translate(12 ${(size.top + size.height - size.bottom) / 2}) rotate(-90)`);

    const legend = document.createElement("div");
    legend.className = "legend";
    const entry = (name, colour, dash, width, ...toggled) => {
      const button = document.createElement("button");
      button.type = "button";
      button.setAttribute("aria-pressed", "true");
      const swatch = made("svg", { viewBox: "0 0 26 8" }, button);
      made("line", { x1: 0, x2: 26, y1: 4, y2: 4, stroke: colour, "stroke-width": width, "stroke-dasharray": dash }, swatch);
      button.append(name);
      button.addEventListener("click", () => {
        const on = button.getAttribute("aria-pressed") !== "true";
        button.setAttribute("aria-pressed", String(on));
        for (const group of toggled) group.style.display = on ? "" : "none";
      });
      legend.appendChild(button);
    };
    if (panel.level !== null) {
      const group = made("g", {}, svg);
      made("line", { x1: size.left, x2: size.width - size.right, y1: y(panel.level), y2: y(panel.level), stroke: "#222", "stroke-dasharray": "2 4" }, group);
      entry(`${panel.level_name} (no guarantee)`, "#222", "2 4", 1.5, group);
    }
    const groups = new Map();
    for (const line of panel.lines) {
      const group = made("g", {}, svg);
      groups.set(line.name, group);
      const banded = line.points.filter((point) => point[2]);
      if (banded.length > 1) {
        const upper = banded.map(([epsilon, value, spread]) => `${x(epsilon)},${y(Math.min(high, value + spread))}`);
        const lower = banded.map(([epsilon, value, spread]) => `${x(epsilon)},${y(Math.max(low, value - spread))}`).reverse();
        made("polygon", { points: [...upper, ...lower].join(" "), fill: line.colour, opacity: 0.14 }, group);
      }
      const dash = line.dashed ? (line.thin ? "3 3" : "7 4") : "none";
      const width = line.thin ? 1 : 2.2;
      made("polyline", {
        points: line.points.map(([epsilon, value]) => `${x(epsilon)},${y(value)}`).join(" "),
        fill: "none", stroke: line.colour, "stroke-width": width, "stroke-dasharray": dash,
      }, group);
      if (!line.thin) for (const [epsilon, value] of line.points) made("circle", { cx: x(epsilon), cy: y(value), r: 2.6, fill: line.colour }, group);
      // a method's entry also hides the paper's curve of it
      if (!line.thin) entry(line.name, line.colour, dash, width, ...[group, groups.get(`paper: ${line.name}`)].filter(Boolean));
    }
    if (panel.lines.some((line) => line.thin)) legend.append(Object.assign(document.createElement("span"), { className: "thin", textContent: "thin lines: the paper's curves" }));

    const tip = document.createElement("div");
    tip.className = "tip";
    tip.hidden = true;
    const cursor = made("line", { y1: size.top, y2: size.height - size.bottom, stroke: "#9aa4ad", visibility: "hidden" }, svg);
    const show = (event) => {
      const box = svg.getBoundingClientRect();
      const at = ((event.clientX - box.left) / box.width) * size.width;
      const nearest = epsilons.reduce((best, each) => (Math.abs(x(each) - at) < Math.abs(x(best) - at) ? each : best));
      cursor.setAttribute("x1", x(nearest));
      cursor.setAttribute("x2", x(nearest));
      cursor.setAttribute("visibility", "visible");
      tip.replaceChildren(Object.assign(document.createElement("strong"), { textContent: `epsilon ${short(nearest)}` }));
      for (const line of panel.lines) {
        const atNearest = (each) => each && each.points.find((point) => point[0] === nearest);
        const point = atNearest(line);
        if (line.thin || !point || groups.get(line.name).style.display === "none") continue;
        const paper = atNearest(panel.lines.find((each) => each.name === `paper: ${line.name}`));
        const row = document.createElement("div");
        const colour = document.createElement("i");
        colour.style.background = line.colour;
        const spread = point[2] ? ` ± ${point[2].toFixed(3)}` : "";
        row.append(colour, `${point[1].toFixed(3)}${spread}  ${line.name.replace(/ \([^)]*\)$/, "")}${paper ? `, paper ${paper[1].toFixed(3)}` : ""}`);
        tip.appendChild(row);
      }
      tip.hidden = false;
      const place = event.clientX - box.left;
      const left = narrow ? "0" : place < box.width / 2 ? `${place + 14}px` : "auto";
      tip.style.top = narrow ? `${svg.getBoundingClientRect().bottom - figure.getBoundingClientRect().top}px` : "34px";
      tip.style.left = left;
      tip.style.right = left === "auto" ? `${box.width - place + 14}px` : narrow ? "0" : "auto";
    };
    svg.addEventListener("pointermove", show);
    svg.addEventListener("pointerdown", show);
    svg.addEventListener("pointerleave", () => { tip.hidden = true; cursor.setAttribute("visibility", "hidden"); });
    figure.append(legend, tip);
    if (panel.note) figure.appendChild(Object.assign(document.createElement("p"), { className: "note", textContent: panel.note }));
    return figure;
  };

  const buttons = [...document.querySelectorAll(".tabs button")];
  const choose = (chosen) => {
    for (const button of buttons) button.setAttribute("aria-selected", String(button.dataset.set === chosen));
    holder.replaceChildren(...panels.filter((panel) => panel.dataset === chosen).map(draw));
  };
  for (const button of buttons) {
    button.setAttribute("role", "tab");
    button.addEventListener("click", () => choose(button.dataset.set));
  }
  if (buttons.length) choose(buttons[0].dataset.set);
})();
