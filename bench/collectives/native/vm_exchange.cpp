// What an allreduce of private arrays asks of the system on one node, and nothing else: vm_exchange SOCKET RANKS forks
// programs that each read a slice of every other one's array and write it back, with the calls and in the blocks of ours.
// They add nothing up.
#include <pthread.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <sys/wait.h>

#include <algorithm>
#include <string>
#include <vector>

#include "orders.h"

namespace {

constexpr int max_ranks = 64;
constexpr std::size_t block_bytes = 64 << 10;
constexpr std::size_t page_bytes = 4096;

struct Board {
  pthread_barrier_t barrier;
  pid_t pids[max_ranks];
  char* arrays[max_ranks];
};

Board* board = nullptr;

void copy(decltype(&process_vm_readv) call, int rank, char* mine, std::size_t at, std::size_t bytes) {
  const iovec local{mine, bytes}, remote{board->arrays[rank] + at, bytes};
  if (call(board->pids[rank], &local, 1, &remote, 1, 0) != static_cast<ssize_t>(bytes)) die("process_vm");
}

void exchange(int rank, int ranks, std::size_t bytes, char* scratch) {
  const std::size_t each = (bytes / static_cast<std::size_t>(ranks) + page_bytes) / page_bytes * page_bytes;
  const std::size_t end = std::min(bytes, each * (static_cast<std::size_t>(rank) + 1));
  for (std::size_t at = std::min(bytes, each * static_cast<std::size_t>(rank)); at < end; at += block_bytes) {
    const std::size_t some = std::min(block_bytes, end - at);
    for (int other = 0; other < ranks; ++other) {
      if (other != rank) copy(process_vm_readv, other, scratch + static_cast<std::size_t>(other) * block_bytes, at, some);
    }
    for (int other = 0; other < ranks; ++other) {
      if (other != rank) copy(process_vm_writev, other, scratch + static_cast<std::size_t>(other) * block_bytes, at, some);
    }
  }
  pthread_barrier_wait(&board->barrier);
}

void obey(int rank, int ranks) {
  char line[MAX_LINE], *words[MAX_WORDS];
  std::size_t bytes = 0;
  char* scratch = static_cast<char*>(big_buffer(block_bytes * static_cast<std::size_t>(ranks)));
  while (orders_next(line, words) > 0) {
    if (std::string(words[0]) == "prepare") {
      bytes = std::stoull(words[2]);
      std::free(board->arrays[rank]);
      board->arrays[rank] = bytes > 0 ? static_cast<char*>(big_buffer(bytes)) : nullptr;
      if (bytes > 0) memset(board->arrays[rank], rank + 1, bytes);
      ANSWER("{}");
    } else {
      const int loops = std::stoi(words[2]);
      std::vector<double> times(static_cast<std::size_t>(loops));
      pthread_barrier_wait(&board->barrier);
      const double begun = now_s();
      double before = begun;
      for (double& seconds : times) {
        exchange(rank, ranks, bytes, scratch);
        const double after = now_s();
        seconds = after - before;
        before = after;
      }
      answer_times(before - begun, times.data(), loops);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int ranks = argc == 3 ? std::atoi(argv[2]) : 0;
  if (ranks < 1 || ranks > max_ranks) return 2;
  board = static_cast<Board*>(mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  if (board == MAP_FAILED) die("mmap");
  pthread_barrierattr_t shared;
  pthread_barrierattr_init(&shared);
  pthread_barrierattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
  pthread_barrier_init(&board->barrier, &shared, static_cast<unsigned>(ranks));
  int rank = 0;
  while (rank < ranks && fork() != 0) ++rank;
  if (rank == ranks) {  // the parent only waits
    int status, failures = 0;
    while (wait(&status) > 0) failures += status != 0;
    return failures;
  }
  board->pids[rank] = getpid();
  orders_open(argv[1], rank, "");
  obey(rank, ranks);
  return 0;
}
