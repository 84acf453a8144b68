// Lets the library run with the C++ runtime of GCC 5 and later, though it was compiled by GCC 11 or later: their headers call this
// function, the only one that older runtimes lack.
#include <new>

#if defined(__GLIBCXX__) && __GNUC__ >= 11
namespace std {
__attribute__((visibility("hidden"))) void __throw_bad_array_new_length() { throw std::bad_array_new_length(); }
}  // namespace std
#endif
