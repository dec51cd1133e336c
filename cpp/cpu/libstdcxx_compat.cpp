// std::vector of GCC 11 and later calls this function of libstdc++ 3.4.29. A hidden definition here
// lets the library run with the libstdc++ 3.4.24 of manylinux_2_28, too. It is weak, because
// libstdc++.a may contain another definition.

#include <new>

extern "C" {
[[noreturn]] __attribute__((weak, visibility("hidden"))) void torchkiln_bad_array_length() __asm__(
    "_ZSt28__throw_bad_array_new_lengthv");

void torchkiln_bad_array_length() { throw std::bad_array_new_length(); }
}
