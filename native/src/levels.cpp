// Which sets of instructions this processor has.
#include "rows.hpp"

#if defined(AMX_ROWS)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace rows {

#if defined(AMX_ROWS)
namespace {

// Whether the processor has tiles, the system saves them, and lets this program use them: Linux gives
// their 8 KB only to those that ask (ARCH_REQ_XCOMP_PERM for XFEATURE_XTILEDATA).
bool has_amx() {
    unsigned a, b, c, d, state, high;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d >> 24 & 3) != 3) return false;
    __asm__("xgetbv" : "=a"(state), "=d"(high) : "c"(0));
    return (state >> 17 & 3) == 3 && syscall(SYS_arch_prctl, 0x1023, 18) == 0;
}

}  // namespace
#endif

#if defined(ARM_ROWS)
namespace {

#if defined(__APPLE__)
bool has(const char *feature) {
    int found = 0;
    size_t size = sizeof found;
    return sysctlbyname(feature, &found, &size, nullptr, 0) == 0 && found != 0;
}
bool has_dotprod() { return has("hw.optional.arm.FEAT_DotProd"); }
[[maybe_unused]] bool has_i8mm() { return has("hw.optional.arm.FEAT_I8MM"); }
#elif defined(__linux__)
// HWCAP_ASIMDDP and HWCAP2_I8MM, which older headers do not have.
bool has_dotprod() { return (getauxval(AT_HWCAP) >> 20 & 1) != 0; }
[[maybe_unused]] bool has_i8mm() { return (getauxval(AT_HWCAP2) >> 13 & 1) != 0; }
#else
bool has_dotprod() { return false; }
[[maybe_unused]] bool has_i8mm() { return false; }
#endif

}  // namespace
#endif

std::vector<std::pair<std::string, const Level *>> find_levels() {
    std::vector<std::pair<std::string, const Level *>> found{{"plain", &plain}};
#if defined(WIDE_ROWS)
    if (__builtin_cpu_supports("avx2")) found.emplace_back("avx2", &avx2);
#if defined(AVXVNNI_ROWS)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("avxvnni"))
        found.emplace_back("avxvnni", &avxvnni);
#endif
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512vnni"))
        found.emplace_back("avx512", &avx512);
#if defined(AMX_ROWS)
    if (found.back().second == &avx512 && has_amx()) found.emplace_back("amx", &amx);
#endif
#endif
#if defined(ARM_ROWS)
    if (has_dotprod()) found.emplace_back("dotprod", &dotprod);
#if defined(I8MM_ROWS)
    if (has_dotprod() && has_i8mm()) found.emplace_back("i8mm", &i8mm);
#endif
#endif
    return found;
}

}  // namespace rows
