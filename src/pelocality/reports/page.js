(function () {
  const specs = JSON.parse(document.getElementById("charts").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const palette = (isDark) => (isDark ? { ink: "#e4e8ec", rule: "#343c44", paper: "#1d2329" } : { ink: "#1c2126", rule: "#d9dee3", paper: "#ffffff" });
  const places = [...document.querySelectorAll(".figure[data-chart]")];
  const axis = (given, colours) => ({ ...given, color: colours.ink, gridcolor: colours.rule, zerolinecolor: colours.rule, linecolor: colours.rule });

  function draw(colours, width) {
    for (const place of places) {
      const spec = specs[Number(place.dataset.chart)];
      const layout = {
        ...spec.layout,
        paper_bgcolor: "rgba(0,0,0,0)",
        plot_bgcolor: "rgba(0,0,0,0)",
        font: { family: "system-ui, sans-serif", size: 12, color: colours.ink },
        xaxis: axis(spec.layout.xaxis, colours),
        yaxis: axis(spec.layout.yaxis, colours),
        hoverlabel: { bgcolor: colours.paper, bordercolor: colours.ink, font: { color: colours.ink } },
        autosize: !width,
        ...(width ? { width: place.parentElement.children.length > 1 ? width / 2 - 5 : width } : {}),
      };
      Plotly.react(place, spec.data, layout, { displaylogo: false, responsive: true, modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]] });
    }
  }

  draw(palette(dark.matches));
  dark.addEventListener("change", () => draw(palette(dark.matches)));
  window.addEventListener("beforeprint", () => draw(palette(false), 660));
  window.addEventListener("afterprint", () => draw(palette(dark.matches)));
})();
