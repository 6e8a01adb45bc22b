watch("value", draw);
draw();
list.dataset.ready = "";
