// Newer standard libraries ask glibc (2.32 or later) whether there is only one thread, to spare
// atomic instructions. Answered here with no, since torch has threads: what is built on a new
// system then runs on an older one, too, down to the glibc 2.28 of manylinux_2_28.
extern "C" {
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
}
