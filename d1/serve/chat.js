
/* The chat: each answer is a film that grows with the server's stream of steps and, when it is whole, can be replayed. */
let messages = [], asking = null;

function turn(who, text) {
  byId("turns").append(make("div", "turn", [make("b", "", who), text]));
}

/* The data of server-sent events, one after the other. */
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "", part; !(part = await reader.read()).done;) {
    const events = (rest + part.value).split("\n\n");
    rest = events.pop();
    for (const event of events) if (event !== "data: [DONE]") yield JSON.parse(event.slice(6));
  }
}

function blank(length, prompt) {
  const of = (value) => Array.from({ length }, () => value);
  return { title: "answer", note: "", prompt, tokens: of([1, "░", 0]), steps: of(-2), at: of(Infinity), passes: 0,
    logps: of(0), entropies: of(0), fed: [], seconds: [], drafts: [] };
}

/* What a pass revealed joins the film. */
function grow(film, step, seconds) {
  step.places.forEach((position, i) => {
    film.tokens[position] = step.tokens[i];
    film.logps[position] = step.logps[i];
    film.entropies[position] = step.entropies[i];
    film.steps[position] = film.passes;
    film.at[position] = film.passes + 1;
  });
  film.passes += 1;
  film.fed.push(step.fed);
  film.seconds.push(seconds);
}

async function answer(body, headers, signal) {
  const began = performance.now(), response = await fetch("v1/chat/completions", { method: "POST", body, headers, signal });
  if (!response.ok) throw new Error((await response.json()).error.message);
  let film = null, text = "";
  for await (const event of eventsOf(response)) {
    if (event.error) throw new Error(event.error.message);
    text += event.choices[0]?.delta.content ?? "";
    if (!event.step) continue;
    film ??= blank(event.step.length, messages.at(-1).content);
    grow(film, event.step, (performance.now() - began) / 1000);
    const live = card(film, () => {});
    live.show(film.passes);
    byId("scenes").replaceChildren(live.node);
  }
  return [film, text];
}

byId("ask").addEventListener("submit", async (event) => {
  event.preventDefault();
  const said = byId("said").value.trim(), key = byId("key").value, asked = { stream: true, stream_steps: true };
  if (!said || asking) return;
  const [length, heat] = [byId("length").valueAsNumber, byId("temperature").valueAsNumber];
  if (length) asked.max_tokens = length;
  if (heat >= 0) asked.temperature = heat;
  messages.push({ role: "user", content: said });
  asking = new AbortController();
  byId("trouble").textContent = "";
  byId("stop").hidden = !(byId("send").disabled = true);
  const headers = { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  try {
    const [film, text] = await answer(JSON.stringify({ ...asked, messages }), headers, asking.signal);
    messages.push({ role: "assistant", content: text });
    turn("you", said);
    turn("model", text);
    byId("said").value = "";
    if (film) {
      film.at = film.at.map((at) => Math.min(at, film.passes));
      film.steps = film.steps.map((step) => (step < 0 ? -1 : step));
      film.tokens = film.tokens.map((token, i) => (film.steps[i] < 0 ? [1, "", 0] : token));
      players.splice(0, 1, player({ title: "", films: [film] }, 0));
      byId("scenes").replaceChildren(players[0].node);
      setView(view);
    }
  } catch (error) {
    messages.pop();
    byId("trouble").textContent = error.name === "AbortError" ? "stopped" : error.message;
  } finally {
    asking = null;
    byId("stop").hidden = !(byId("send").disabled = false);
  }
});
byId("stop").addEventListener("click", () => asking?.abort());
byId("reset").addEventListener("click", () => {
  asking?.abort();
  messages = [];
  byId("turns").replaceChildren();
  byId("scenes").replaceChildren();
});
byId("said").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); byId("ask").requestSubmit(); }
});
