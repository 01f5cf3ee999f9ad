"""One self-contained page of a scene: HTML, inline SVG, style and a little script; nothing from elsewhere."""
