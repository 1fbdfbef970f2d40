// Before the first paint: the theme that was chosen here before. "auto" is the system's.
"use strict";
(() => {
  const apply = (theme) => {
    if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
    document.dispatchEvent(new CustomEvent("theme"));
  };
  let chosen = "auto";
  try { chosen = localStorage.getItem("theme") || "auto"; } catch { /* storage is forbidden: the system's theme */ }
  apply(chosen);
  document.addEventListener("DOMContentLoaded", () => {
    const select = document.getElementById("theme");
    select.value = chosen;
    select.addEventListener("change", () => {
      apply(select.value);
      try { localStorage.setItem("theme", select.value); } catch { /* for this page only */ }
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => document.dispatchEvent(new CustomEvent("theme")));
  });
})();
