// Linked into a test that says that it makes no thread: then the thread sanitizer has nothing to find in it. Taken before the
// function of the C library, by the library of the standard too.
#include <pthread.h>

#include <cstdio>
#include <cstdlib>

extern "C" __attribute__((visibility("default"))) int pthread_create(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*) noexcept {
  std::fputs("this test is in FF_TESTS_WITH_ONE_THREAD (cpp/CMakeLists.txt), but makes a thread\n", stderr);
  std::abort();
}
