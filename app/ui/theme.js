/* Sets the theme before the first paint; it is not a module, because modules run later. */
{
  const KEY = "smart-embedder-theme";
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const chosen = () => localStorage.getItem(KEY);
  const current = () => chosen() ?? (dark.matches ? "dark" : "light");

  const apply = () => {
    root.dataset.theme = current();
    const button = document.getElementById("theme");
    button?.setAttribute(
      "aria-label",
      `Switch to the ${current() === "dark" ? "light" : "dark"} theme`,
    );
    document.dispatchEvent(new Event("themechange"));
  };

  const switchTheme = () => {
    const next = current() === "dark" ? "light" : "dark";
    // The theme of the system is not stored, so that the page follows it again.
    if (next === (dark.matches ? "dark" : "light")) localStorage.removeItem(KEY);
    else localStorage.setItem(KEY, next);
    apply();
  };

  apply();
  dark.addEventListener("change", apply);
  document.addEventListener("DOMContentLoaded", () => {
    apply();
    document.getElementById("theme").addEventListener("click", switchTheme);
  });
}
