#include "module.hpp"
#include "noise.hpp"

#include <nanobind/ndarray.h>

namespace nb = nanobind;

namespace {

using Tokens = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// The noise of some tokens at one absolute position of one seed, into `found`.
void gumbel(uint64_t seed, uint64_t position, Tokens tokens, Floats found) {
    const uint64_t key = noise::key(seed, position);
    for (size_t i = 0; i < tokens.shape(0) && i < found.shape(0); ++i)
        found(i) = noise::gumbel(key, static_cast<uint64_t>(tokens(i)));
}

}  // namespace

void bind_sampling(nb::module_ &module) {
    module.def("gumbel", &gumbel, nb::arg("seed"), nb::arg("position"), nb::arg("tokens"),
               nb::arg("found"), nb::call_guard<nb::gil_scoped_release>());
}
