// Draw the diagrams in the colours of the page: once, and again when the reader switches between light and dark.
const diagrams = [...document.querySelectorAll("pre.mermaid")];
const sources = diagrams.map((diagram) => diagram.textContent);

function isDark() {
  const theme = document.body.dataset.theme;
  return theme === "dark" || (theme !== "light" && matchMedia("(prefers-color-scheme: dark)").matches);
}

function draw() {
  diagrams.forEach((diagram, index) => {
    diagram.removeAttribute("data-processed");
    diagram.textContent = sources[index];
  });
  mermaid.initialize({ startOnLoad: false, securityLevel: "strict", theme: isDark() ? "dark" : "neutral" });
  mermaid.run({ nodes: diagrams });
}

if (typeof mermaid !== "undefined") {
  draw();
  new MutationObserver(draw).observe(document.body, { attributes: true, attributeFilter: ["data-theme"] });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}
