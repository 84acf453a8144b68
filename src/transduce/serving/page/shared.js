// Common code of both pages of `transduce serve`: requests, messages, and the choice of dark or light.
"use strict";

const byId = (id) => document.getElementById(id);

// Send a request and return its response if it succeeds; throw an error with its message and status otherwise.
async function send(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  if (byId("key").value) headers.Authorization = `Bearer ${byId("key").value}`;
  const request = body === null ? { headers, signal } : { method: "POST", headers, body: JSON.stringify(body), signal };
  const response = await fetch(path, request).catch((error) => { if (signal?.aborted) throw error; return null; });
  if (response?.ok) return response;
  const answer = response ? await response.json().catch(() => ({})) : { error: "The service cannot be reached" };
  const error = new Error(answer.error?.message || answer.error || `the service answered with status ${response.status}`);
  error.status = response ? response.status : 0;
  error.retryAfter = Number(response?.headers.get("Retry-After")) || 2;
  if (error.status === 401) Object.assign(byId("key-box"), { hidden: false, open: true });
  throw error;
}

const ask = async (path, body, signal) => (await send(path, body, signal)).json().catch(() => ({}));

const pause = (seconds, signal) => new Promise((resolve, reject) => {
  const wait = setTimeout(resolve, 1000 * seconds);
  signal?.addEventListener("abort", () => { clearTimeout(wait); reject(signal.reason); }, { once: true });
});

function show(message, isError = false) {
  byId("status").textContent = message;
  byId("status").classList.toggle("error", isError);
}

// Create an element that contains a text or another element.
function marked(name, content) {
  const element = document.createElement(name);
  element.append(content);
  return element;
}

const kept = (() => { try { return localStorage; } catch { return {}; } })(); // a browser may forbid it

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  byId("theme").setAttribute("aria-pressed", String(theme === "dark"));
}

setTheme(kept.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
byId("theme").addEventListener("click", () => setTheme(kept.theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
