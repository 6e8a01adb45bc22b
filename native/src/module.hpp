// What each subject adds to the module.
#pragma once
#include <nanobind/nanobind.h>

void bind_drafting(nanobind::module_ &module);
void bind_sampling(nanobind::module_ &module);
void bind_quantised(nanobind::module_ &module);
