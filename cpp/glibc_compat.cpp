// Newer standard libraries read this variable of glibc (2.32 or later) to skip atomic instructions
// in single-threaded programs. Defined here as false, since torch has threads, so that a library
// built on a new system also runs on an older one, down to the glibc 2.28 of manylinux_2_28.
extern "C" {
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
}
