// A variable of glibc 2.32 or later. Newer standard libraries read it to skip atomic instructions
// in single-threaded programs. It is defined here as false, because torch has threads. With this
// definition, a library built on a new system also runs on an older one, down to the glibc 2.28 of
// manylinux_2_28.
extern "C" {
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
}
