/* Send orders without leaving the page, and update the gallery.

   Cards are changed in place and never rebuilt, so focus, scroll position and loaded pictures are kept. */
"use strict";

const api = document.body.dataset.api;
const messages = document.getElementById("messages");
const cards = document.getElementById("cards");
const template = document.getElementById("card").content.firstElementChild;
const visitors = document.getElementById("visitors");
const barTemplate = document.getElementById("bar").content.firstElementChild;
const films = document.getElementById("films");
const filmTemplate = document.getElementById("film").content.firstElementChild;
const filmForm = document.querySelector("form.film");
const you = document.getElementById("visitor");
const pauseButton = document.getElementById("pause");

const REFRESH_MS = 1000;
let timer = 0;
let paused = false;
let fetching = false;
let again = false;

function showMessage(text, kind, place = messages) {
  const line = document.createElement("p");
  line.className = kind;
  line.textContent = text;
  place.replaceChildren(line);
  line.scrollIntoView({ block: "nearest" });
}

/* ---- the gallery */

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function fillCard(card, render) {
  const field = (name) => card.querySelector(`[data-field="${name}"]`);
  card.dataset.state = render.state;
  for (const name of ["title", "state_text", "note"]) setText(field(name), render[name]);
  const image = field("image");
  if (render.image_url && image.getAttribute("src") !== render.image_url) {
    image.src = render.image_url;
    image.alt = `${render.title}, seed ${render.seed}`;
    field("link").href = render.image_url;
  }
  image.hidden = !render.image_url;
  const progress = field("progress");
  progress.hidden = render.progress === null;
  if (!progress.hidden) progress.value = render.progress;
  const cancel = field("cancel");
  cancel.hidden = !render.cancel_url;
  cancel.action = render.cancel_url || "";
  cancel.dataset.status = render.status_url;
  cancel.dataset.title = render.title;
  cancel.querySelector("button").setAttribute("aria-label", `Cancel ${render.title}`);
}

function showRenders(renders) {
  const known = new Map([...cards.children].map((card) => [card.dataset.id, card]));
  let before = null;
  for (const render of renders) {
    let card = known.get(render.id);
    if (!card) {
      card = template.cloneNode(true);
      card.dataset.id = render.id;
      if (before) before.after(card);
      else cards.prepend(card);
    }
    fillCard(card, render);
    known.delete(render.id);
    before = card;
  }
  for (const card of known.values()) card.remove();
  document.getElementById("empty").hidden = renders.length > 0;
}

function showGates(models) {
  for (const model of models) {
    const meter = document.getElementById(`gate-${model.name}`);
    if (!meter) continue;
    meter.setAttribute("viewBox", `0 0 ${model.scale} 1`);
    meter.setAttribute("aria-valuemax", Math.max(model.scale, model.occupancy));
    meter.setAttribute("aria-valuenow", model.occupancy);
    meter.setAttribute("aria-valuetext", model.text);
    meter.firstElementChild.setAttribute("width", model.occupancy);
    meter.parentElement.toggleAttribute("data-full", model.is_full);
    setText(meter.parentElement.querySelector(".gate-text"), model.text);
  }
}

/* How far the renders of each visitor are. A bar is changed in place, as a card is. */
function showVisitors(found) {
  const known = new Map([...visitors.children].map((bar) => [bar.dataset.visitor, bar]));
  found.forEach((visitor, place) => {
    const bar = known.get(visitor.name) || barTemplate.cloneNode(true);
    known.delete(visitor.name);
    bar.dataset.visitor = visitor.name;
    for (const name of ["name", "text"]) setText(bar.querySelector(`[data-field="${name}"]`), visitor[name]);
    const progress = bar.querySelector("progress");
    progress.max = visitor.total;
    progress.value = visitor.done;
    progress.setAttribute("aria-label", `Renders of ${visitor.name}`);
    if (visitors.children[place] !== bar) visitors.insertBefore(bar, visitors.children[place] || null);
  });
  for (const bar of known.values()) bar.remove();
}

/* How far the steps of each film are; it can be seen when all are done. */
function showFilms(found) {
  const known = new Map([...films.children].map((item) => [item.dataset.film, item]));
  found.forEach((film, place) => {
    const item = known.get(film.id) || filmTemplate.cloneNode(true);
    known.delete(film.id);
    item.dataset.film = film.id;
    for (const name of ["name", "text"]) setText(item.querySelector(`[data-field="${name}"]`), film[name]);
    const progress = item.querySelector("progress");
    progress.max = film.total;
    progress.value = film.done;
    progress.setAttribute("aria-label", `Steps of ${film.name}`);
    const link = item.querySelector("a");
    if (film.url && link.getAttribute("href") !== film.url) {
      link.href = film.url;
      link.firstElementChild.src = film.url;
      link.firstElementChild.alt = `${film.name}: a way into the Mandelbrot set and back`;
      link.hidden = false;
    }
    if (films.children[place] !== item) films.insertBefore(item, films.children[place] || null);
  });
  for (const item of known.values()) item.remove();
}

function showCounts(counts) {
  for (const [state, count] of Object.entries(counts)) {
    setText(document.querySelector(`[data-count="${state}"]`), String(count));
  }
}

async function refresh() {
  // What was asked for before an order was sent does not show it yet.
  again = fetching;
  if (fetching) return;
  fetching = true;
  try {
    const response = await fetch(api, { headers: { Accept: "application/json" } });
    if (!response.ok) throw new Error(`the site answered ${response.status}`);
    const found = await response.json();
    showRenders(found.renders);
    showGates(found.models);
    showCounts(found.counts);
    showVisitors(found.visitors);
    showFilms(found.films);
    document.body.classList.remove("stale");
  } catch (error) {
    if (!document.body.classList.contains("stale")) showMessage(`Cannot update the gallery: ${error.message}.`, "error");
    document.body.classList.add("stale");
  } finally {
    fetching = false;
  }
  if (again) await refresh();
}

/* Refresh on a timer that stops while the page is hidden or updates are paused. */
function update() {
  clearTimeout(timer);
  if (paused || document.hidden) return;
  refresh().finally(() => {
    clearTimeout(timer);
    if (!paused && !document.hidden) timer = setTimeout(update, REFRESH_MS);
  });
}

/* ---- who orders, and whether an order waits at a full gate

   Each order asks the fields. The address of the page keeps them, so that each tab may be another visitor. */

function chosen() {
  return { visitor: you.elements.visitor.value.trim(), wait: you.elements.wait.checked };
}

function keepChosen() {
  const { visitor, wait } = chosen();
  const kept = new URLSearchParams({ ...(visitor && { visitor }), ...(wait && { wait: "1" }) }).toString();
  history.replaceState(null, "", kept ? `?${kept}` : location.pathname);
}

you.addEventListener("change", keepChosen);
you.addEventListener("submit", (event) => {
  event.preventDefault();
  keepChosen();
});
document.getElementById("visitor-apply").hidden = true;

/* ---- orders */

// What became of the orders of each form that were sent one upon the other: several quick presses have one answer.
const answers = new Map();
const QUICK_MS = 2000;

async function order(form, copies) {
  let found = answers.get(form);
  if (!found || (!found.pending && Date.now() - found.at > QUICK_MS)) {
    found = { pending: 0, accepted: 0, refusal: "", kind: "success", at: 0 };
    answers.set(form, found);
  }
  found.pending += 1;
  try {
    await send(form, copies, found);
  } catch (error) {
    [found.refusal, found.kind] = [`The order was not sent: ${error.message}.`, "error"];
  }
  found.pending -= 1;
  found.at = Date.now();
  showMessage([`${found.accepted} accepted.`, found.refusal].join(" "), found.kind, form.querySelector(".answer"));
}

async function send(form, copies, found) {
  const data = { model: form.dataset.model, palette: form.elements.palette.value, ...chosen() };
  if (form.elements.seed.value) data.seed = Number(form.elements.seed.value);
  for (let copy = 0; copy < copies; copy += 1) {
    const response = await fetch(api, {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(data),
    });
    if (response.status !== 202) {
      const answer = await response.json();
      const advice = answer.retry_after ? ` Try again in about ${answer.retry_after} s.` : "";
      [found.refusal, found.kind] = [answer.error + advice, [409, 429].includes(response.status) ? "warning" : "error"];
      return;
    }
    found.accepted += 1;
  }
}

for (const form of document.querySelectorAll("form[data-model]")) {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    order(form, Number(event.submitter?.value || 1)).finally(refresh);
  });
}

filmForm.addEventListener("submit", async (event) => {
  event.preventDefault();
  const place = filmForm.querySelector(".answer");
  try {
    const headers = { Accept: "application/json" };
    const response = await fetch(filmForm.action, { method: "POST", body: new FormData(filmForm), headers });
    if (response.status !== 202) throw new Error(`the site answered ${response.status}`);
    showMessage((await response.json()).text, "success", place);
  } catch (error) {
    showMessage(`The order was not sent: ${error.message}.`, "error", place);
  }
  refresh();
});

/* ---- the cancel button of a card */

async function cancel(form) {
  const response = await fetch(form.dataset.status, { method: "DELETE", headers: { Accept: "application/json" } });
  const answer = await response.json();
  showMessage(`${form.dataset.title}: ${answer.text || answer.error}`, response.ok ? "info" : "error");
}

cards.addEventListener("submit", (event) => {
  if (!event.target.dataset.status) return;
  event.preventDefault();
  cancel(event.target)
    .catch((error) => showMessage(`The request was not sent: ${error.message}.`, "error"))
    .finally(refresh);
});

pauseButton.hidden = false;
pauseButton.addEventListener("click", () => {
  paused = !paused;
  pauseButton.setAttribute("aria-pressed", String(paused));
  update();
});
document.addEventListener("visibilitychange", update);
update();
