// The compiled core: the same results as the pure Python beside it, digit for digit, and sooner.
#include "module.hpp"

// Raised whenever engine/native.py has to ask in another way.
constexpr int INTERFACE = 12;

NB_MODULE(strata_native, module) {
    // What is still in use when the program ends is no leak.
    nanobind::set_leak_warnings(false);
    module.attr("INTERFACE") = INTERFACE;
    bind_drafting(module);
    bind_sampling(module);
#if defined(ROWS)
    bind_quantised(module);
#endif
}
