// What all programs of the benchmark share: orders from the harness, a clock, the data, and statistics. C and C++.
//
// A program connects to the harness's Unix socket, says who it is, and then blocks in read(): an idle peer costs nothing
// while others are measured. An order is a line of words, the answer a JSON object on one line.
//
// The data are the integers -8 to 8, so that every order of adding gives the same bits in every type of 16 bits or more:
// element i of rank r is value_of(r, i % BLOCK).
#pragma once

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define BLOCK 262144
#define MAX_WORDS 8
#define MAX_LINE 256

static FILE *orders_in, *orders_out;

static inline void die(const char *what) {
  perror(what);
  _exit(1);
}

// `more` is put into the greeting: "" or e.g. ", \"port\": 4711".
static inline void orders_open(const char *path, int rank, const char *more) {
  struct sockaddr_un address;
  memset(&address, 0, sizeof address);
  address.sun_family = AF_UNIX;
  if (strlen(path) >= sizeof address.sun_path) die("path of the harness's socket");
  memcpy(address.sun_path, path, strlen(path));
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address) != 0) die("connect to the harness");
  orders_in = fdopen(fd, "r");
  orders_out = fdopen(dup(fd), "w");
  if (orders_in == NULL || orders_out == NULL) die("fdopen");
  fprintf(orders_out, "{\"rank\": %d, \"pid\": %d%s}\n", rank, (int)getpid(), more);
  fflush(orders_out);
}

// Reads an order into `words`; returns how many there are, 0 at the end of the benchmark.
static inline int orders_next(char *line, char **words) {
  int count = 0;
  if (fgets(line, MAX_LINE, orders_in) == NULL) return 0;
  for (char *word = strtok(line, " \n"); word != NULL && count < MAX_WORDS; word = strtok(NULL, " \n")) words[count++] = word;
  return count > 0 && strcmp(words[0], "stop") == 0 ? 0 : count;
}

#define ANSWER(...) (fprintf(orders_out, __VA_ARGS__), fputc('\n', orders_out), fflush(orders_out))

static inline double now_s(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

// Of this thread, as fine as the clock.
static inline double thread_cpu_s(void) {
  struct timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

// Of the whole process.
static inline double cpu_s(void) {
  struct rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) + 1e-6 * (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec);
}

// Private memory as NumPy's large arrays have it: huge pages where the system gives them.
static inline void *big_buffer(size_t bytes) {
  const size_t page = (size_t)2 << 20;
  void *memory = NULL;
  if (posix_memalign(&memory, bytes >= page ? page : 4096, bytes < 4096 ? 4096 : bytes) != 0) die("posix_memalign");
  if (bytes >= page) madvise(memory, bytes, MADV_HUGEPAGE);
  return memory;
}

static inline int value_of(int rank, uint32_t index) {
  uint32_t x = (index + 1) * 2654435761u ^ (uint32_t)(rank + 1) * 40503u;
  x ^= x >> 15;
  x *= 2246822519u;
  x ^= x >> 13;
  return (int)(x % 17) - 8;
}

// Element size, or 0 for a type that the programs do not know.
static inline size_t type_bytes(const char *dtype) {
  if (strcmp(dtype, "fp32") == 0) return 4;
  return strcmp(dtype, "bf16") == 0 || strcmp(dtype, "fp16") == 0 ? 2 : 0;
}

static inline void store_value(char *at, const char *dtype, float value) {
  if (strcmp(dtype, "fp32") == 0) {
    memcpy(at, &value, 4);
  } else if (strcmp(dtype, "bf16") == 0) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    const uint16_t high = (uint16_t)(bits >> 16);
    memcpy(at, &high, 2);
  } else {
    const _Float16 half = (_Float16)value;
    memcpy(at, &half, 2);
  }
}

// A block of rank's values; with rank < 0 of the sums over -rank ranks.
static inline char *make_block(int rank, const char *dtype) {
  const size_t unit = type_bytes(dtype);
  char *block = (char *)big_buffer(BLOCK * unit);
  for (uint32_t i = 0; i < BLOCK; ++i) {
    int value = rank < 0 ? 0 : value_of(rank, i);
    for (int r = 0; r < -rank; ++r) value += value_of(r, i);
    store_value(block + i * unit, dtype, (float)value);
  }
  return block;
}

static inline void fill_with(char *data, size_t bytes, const char *block, size_t block_bytes) {
  for (size_t at = 0; at < bytes; at += block_bytes) memcpy(data + at, block, bytes - at < block_bytes ? bytes - at : block_bytes);
}

static inline int filled_with(const char *data, size_t bytes, const char *block, size_t block_bytes) {
  for (size_t at = 0; at < bytes; at += block_bytes)
    if (memcmp(data + at, block, bytes - at < block_bytes ? bytes - at : block_bytes) != 0) return 0;
  return 1;
}

static inline int ascending(const void *a, const void *b) {
  const double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

// Answers with the total, and with the median and 99th percentile of the single operations. Sorts `each`.
static inline void answer_times(double total, double *each, int loops) {
  qsort(each, (size_t)loops, sizeof *each, ascending);
  ANSWER("{\"seconds\": %.9f, \"p50\": %.9f, \"p99\": %.9f}", total, each[loops / 2], each[(int)(0.99 * (loops - 1))]);
}
