// std::vector of GCC 11 and later calls this function of libstdc++ 3.4.29. Defined here, hidden, so
// that the library also runs with the libstdc++ 3.4.24 of manylinux_2_28. The definition is weak,
// because a link with libstdc++.a may bring its own.

#include <new>

extern "C" {
[[noreturn]] __attribute__((weak, visibility("hidden"))) void torchkiln_bad_array_length() __asm__(
    "_ZSt28__throw_bad_array_new_lengthv");

void torchkiln_bad_array_length() { throw std::bad_array_new_length(); }
}
