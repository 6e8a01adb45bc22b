watch("value", draw);
draw();
