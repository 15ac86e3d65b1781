// Dark or light: what the system prefers until somebody chooses. Loaded before the first paint, so that nothing flashes.

const KEY = "noria.theme";
const prefersDark = matchMedia("(prefers-color-scheme: dark)");

function stored() {
  try {
    return localStorage.getItem(KEY);
  } catch {
    return null; // the browser keeps nothing for this site
  }
}

function store(theme) {
  try {
    if (theme) localStorage.setItem(KEY, theme);
    else localStorage.removeItem(KEY);
  } catch {
    // it then lasts as long as the page
  }
}

let chosen = stored();

export function isDark() {
  return chosen ? chosen === "dark" : prefersDark.matches;
}

function apply() {
  if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
  else delete document.documentElement.dataset.theme;
}

/** The other of the two. Back at what the system prefers, the page follows the system again. */
export function toggleTheme() {
  const wanted = isDark() ? "light" : "dark";
  chosen = (wanted === "dark") === prefersDark.matches ? null : wanted;
  store(chosen);
  apply();
}

/** Calls back now and whenever the system changes its mind. */
export function watchTheme(show) {
  prefersDark.addEventListener("change", show);
  show();
}

apply();
