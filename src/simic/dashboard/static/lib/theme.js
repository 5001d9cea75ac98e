/**
 * The button between light and dark: the system's preference until a theme is chosen, which is then remembered.
 */

const DARK = matchMedia("(prefers-color-scheme: dark)");

/** Whether the page is dark now. */
export const isDark = () => (document.documentElement.dataset.theme ?? (DARK.matches ? "dark" : "light")) === "dark";

/** @param {HTMLElement} button @param {() => void} changed what has colours of its own is drawn anew */
export function setUpTheme(button, changed) {
  const show = () => {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `Use the ${isDark() ? "light" : "dark"} theme`);
  };
  button.addEventListener("click", () => {
    const theme = isDark() ? "light" : "dark";
    document.documentElement.dataset.theme = theme;
    try {
      localStorage.setItem("simic-theme", theme);
    } catch {
      // Storage may be forbidden: the choice lasts until the page is loaded again.
    }
    show();
    changed();
  });
  DARK.addEventListener("change", () => {
    show();
    changed();
  });
  show();
}
