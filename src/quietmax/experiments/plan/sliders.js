"use strict";
const plan = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const steps = Object.fromEntries(["epsilon", "people"].map((name) =>
  [name, [...new Set(plan.grid.map((each) => each[name]))].sort((one, other) => one - other)]));
const written = {epsilon: (value) => String(value), people: (value) => value.toLocaleString("en")};
const shown = plan.majority === null ? "survives" : "accuracy";
const share = (value) => shown === "accuracy" ? value.toFixed(3) : `${(100 * value).toFixed(0)}%`;
const percent = (guess) => `${(Math.ceil(1000 * guess) / 10).toFixed(1)}%`;
const between = ({low, high}, write) => `${write(low)} to ${write(high)} in 90% of simulations`;
const SIGNS = {strong: "strong protection ●●●", moderate: "moderate protection ●●○", weak: "weak protection ●○○", none: "no protection ○○○"};
const LEFT = 52, RIGHT = 468, TOP = 12, BOTTOM = 206;
const values = plan.grid.map((each) => each[shown]).filter(Boolean);
const levels = shown === "accuracy" ? [plan.majority, plan.achievable].filter((each) => each !== null) : [1];
// Below what nobody would use, a curve is cut: one wide interval would flatten all others.
const floor = shown === "accuracy" ? (plan.majority ?? 0) - 0.15 : -0.5;
const lowest = Math.max(Math.min(...values.map(({low}) => low), ...levels), floor), highest = Math.max(...values.map(({high}) => high), ...levels);
const pad = 0.05 * (highest - lowest || 1);
const height = (value) => BOTTOM - (BOTTOM - TOP) * (Math.max(value, lowest - pad) - lowest + pad) / (highest - lowest + 2 * pad);
function added(place, tag, attributes, text = "") {
  const element = place.appendChild(document.createElementNS("http://www.w3.org/2000/svg", tag));
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = text;
}
function draw(svg, name, outlooks, chosen, marked) {
  const known = outlooks.filter((each) => each[shown]);
  const at = (each) => LEFT + 16 + (RIGHT - LEFT - 32) * steps[name].indexOf(each[name]) / Math.max(steps[name].length - 1, 1);
  const points = (end) => known.map((each) => `${at(each).toFixed(1)},${height(each[shown][end]).toFixed(1)}`);
  svg.replaceChildren();
  for (let step = 0; step <= 4; step++) {
    const value = lowest + (highest - lowest) * step / 4, y = height(value);
    added(svg, "line", {x1: LEFT, x2: RIGHT, y1: y, y2: y, class: "grid"});
    added(svg, "text", {x: LEFT - 6, y: y + 4, "text-anchor": "end"}, share(value));
  }
  for (const level of levels) added(svg, "line", {x1: LEFT, x2: RIGHT, y1: height(level), y2: height(level), class: "level"});
  added(svg, "polygon", {points: [...points("low"), ...points("high").reverse()].join(" "), class: "band"});
  added(svg, "polyline", {points: points("expected").join(" "), class: "line"});
  for (const each of outlooks) {
    const x = at(each), here = each === chosen;
    if (here) added(svg, "line", {x1: x, x2: x, y1: TOP, y2: BOTTOM, class: "cursor"});
    added(svg, "text", {x, y: BOTTOM + 20, "text-anchor": "middle", ...(here ? {"font-weight": 700} : {})}, written[name](each[name]));
    if (!each[shown]) continue;
    if (each[name] === marked) added(svg, "circle", {cx: x, cy: height(each[shown].expected), r: 9, class: "enough"});
    if (here) added(svg, "circle", {cx: x, cy: height(each[shown].expected), r: 6, class: "here"});
  }
  svg.setAttribute("aria-label", `${byId("shown").textContent} by ${name}: ` +
    known.map((each) => `${written[name](each[name])}: ${share(each[shown].expected)}`).join(", "));
}
function show() {
  const [epsilon, people] = ["epsilon", "people"].map((name) => steps[name][byId(name).value]);
  const text = {epsilon: written.epsilon(epsilon), people: written.people(people)};
  for (const name of ["epsilon", "people"]) {
    byId(`${name}-text`).textContent = text[name];
    byId(name).setAttribute("aria-valuetext", text[name]);
  }
  const chosen = plan.grid.find((each) => each.epsilon === epsilon && each.people === people), value = chosen[shown];
  byId("shown").textContent = shown === "accuracy" ? "Accuracy" : "What survives of the achievable";
  byId("value").textContent = value ? share(value.expected) : "unknown";
  byId("value-note").textContent = (value ? `${between(value, share)}. ` : "") + (shown === "survives"
    ? "The share of the accuracy above the most frequent class that privacy leaves. State the majority for an accuracy."
    : `${Math.abs(value.expected - plan.majority).toFixed(3)} ${value.expected < plan.majority ? "below" : "above"} always naming the most frequent class (${plan.majority}).`);
  byId("guess").textContent = percent(chosen.max_guess);
  Object.assign(byId("strength"), {textContent: SIGNS[chosen.strength], className: `badge ${chosen.strength}`});
  byId("ece").textContent = chosen.calibration_error.expected.toFixed(3);
  byId("ece-note").textContent = `${between(chosen.calibration_error, (each) => each.toFixed(3))}. How far stated probabilities are from what is right.`;
  const flat = plan.flat[byId("people").value], enough = plan.enough[byId("epsilon").value];
  byId("flattens").textContent = flat === null
    ? `With ${text.people} people, accuracy still rises at epsilon ${steps.epsilon.at(-1)}.`
    : `With ${text.people} people, accuracy flattens at epsilon ${flat}: a larger one is expected to add less than ${plan.least.flat}.`;
  byId("enough").textContent = enough === null
    ? `At epsilon ${text.epsilon}, more than ${written.people(steps.people.at(-1))} people are needed to lose at most ${plan.least.enough} of accuracy.`
    : `At epsilon ${text.epsilon}, ${written.people(enough)} people are enough to lose at most ${plan.least.enough} of accuracy.`;
  byId("by-epsilon-title").textContent = `Over epsilon, with ${text.people} people`;
  byId("by-people-title").textContent = `Over the number of people, at epsilon ${text.epsilon}`;
  draw(byId("by-epsilon"), "epsilon", plan.grid.filter((each) => each.people === people), chosen, flat);
  draw(byId("by-people"), "people", plan.grid.filter((each) => each.epsilon === epsilon), chosen, enough);
}
for (const name of ["epsilon", "people"]) {
  Object.assign(byId(name), {max: steps[name].length - 1, value: steps[name].indexOf(plan[name])});
  byId(name).addEventListener("input", show);
}
byId("fewest").textContent = written.people(steps.people[0]);
byId("most").textContent = written.people(steps.people.at(-1));
byId("levels").textContent = (shown === "survives" ? "Dotted: all of it." : `Dotted: the most frequent class${plan.achievable === null ? "" : ", and what is achievable without privacy, as stated"}.`) + " Ring: what is enough.";
byId("delta").textContent = plan.delta;
for (const sentence of plan.assumptions) byId("assumptions").appendChild(document.createElement("li")).textContent = sentence;
for (const each of plan.grid) {
  const row = byId("rows").insertRow();
  const interval = (found) => found ? `${found.expected.toFixed(3)} (${found.low.toFixed(3)} to ${found.high.toFixed(3)})` : "";
  const {people, epsilon, accuracy, survives, calibration_error: error} = each;
  for (const text of [written.people(people), epsilon, interval(accuracy), interval(survives), interval(error), percent(each.max_guess)]) row.insertCell().textContent = text;
}
byId("live").hidden = false;
show();
