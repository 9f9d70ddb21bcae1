// What sockets of this machine can do, without a file system: the bounds of the chunk store's figures.
//
//   sockets stream FILE BYTES DEPTH SECONDS     a server sends BYTES of FILE by sendfile for each request of 8 bytes;
//                                               DEPTH requests are under way; prints bytes per second
//   sockets echo REQUEST REPLY DEPTH SECONDS SERVERS all|each    epoll servers answer requests of REQUEST bytes with
//                                               REPLY bytes, all that have come in one call, or each in one of its own;
//                                               prints replies per second
//   sockets delay REQUEST REPLY COUNT           the same, one at a time; prints the seconds of each
//
// Each server is a process of its own, with one connection. Behind a rate follows the processor time of one unit, of
// client and servers together.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { most_out = 4 << 20, most_servers = 64 };

static void fail(const char *what) {
  fprintf(stderr, "%s: %s\n", what, strerror(errno));
  exit(1);
}

static double now_s(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void send_all(int fd, const char *data, size_t n) {
  while (n > 0) {
    const ssize_t sent = send(fd, data, n, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) fail("send");
    data += sent, n -= (size_t)sent;
  }
}

// Waits for input by epoll, as a server of many connections does. 0: the other end is gone.
static size_t receive(int poll, int fd, char *into, size_t n) {
  struct epoll_event event;
  for (;;) {
    if (epoll_wait(poll, &event, 1, -1) < 0 && errno != EINTR) fail("epoll_wait");
    const ssize_t got = recv(fd, into, n, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    return got < 0 ? 0 : (size_t)got;
  }
}

static int watch(int fd) {
  const int poll = epoll_create1(0);
  struct epoll_event event = {.events = EPOLLIN};
  if (poll < 0 || epoll_ctl(poll, EPOLL_CTL_ADD, fd, &event) != 0) fail("epoll");
  return poll;
}

static void serve_stream(int fd, const char *path, size_t bytes) {
  const int poll = watch(fd), file = open(path, O_RDONLY);
  if (file < 0) fail(path);
  char in[8192];
  size_t have = 0;
  for (;;) {
    const size_t got = receive(poll, fd, in, sizeof in);
    if (got == 0) return;
    for (have += got; have >= 8; have -= 8) {
      off_t at = 0;
      while ((size_t)at < bytes)
        if (sendfile(fd, file, &at, bytes - (size_t)at) < 0 && errno != EINTR && errno != EAGAIN) return;
    }
  }
}

static void serve_echo(int fd, size_t request, size_t reply, int each) {
  const int poll = watch(fd);
  const size_t room = reply > most_out ? reply : most_out;
  char *const in = malloc(1 << 20), *const out = malloc(room);
  if (in == NULL || out == NULL) fail("malloc");
  memset(out, 7, room);
  for (size_t have = 0;;) {
    const size_t got = receive(poll, fd, in, 1 << 20);
    if (got == 0) return;
    have += got;
    size_t count = have / request;
    have %= request;
    for (size_t some; count > 0; count -= some) {
      some = each ? 1 : count * reply > room ? room / reply : count;
      send_all(fd, out, some * reply);
    }
  }
}

static int connected(pid_t *server, void (*serve)(int, char **), char **arguments) {
  const int listening = socket(AF_INET, SOCK_STREAM, 0), one = 1;
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t length = sizeof address;
  if (listening < 0 || bind(listening, (struct sockaddr *)&address, sizeof address) != 0 || listen(listening, 1) != 0) fail("listen");
  if (getsockname(listening, (struct sockaddr *)&address, &length) != 0) fail("getsockname");
  *server = fork();
  if (*server < 0) fail("fork");
  if (*server == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    const int fd = accept(listening, NULL, NULL);
    if (fd < 0) fail("accept");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    serve(fd, arguments);
    _exit(0);
  }
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address) != 0) fail("connect");
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  close(listening);
  return fd;
}

static void stream(int fd, char **a) { serve_stream(fd, a[0], strtoul(a[1], NULL, 10)); }
static void echo_all(int fd, char **a) { serve_echo(fd, strtoul(a[0], NULL, 10), strtoul(a[1], NULL, 10), 0); }
static void echo_each(int fd, char **a) { serve_echo(fd, strtoul(a[0], NULL, 10), strtoul(a[1], NULL, 10), 1); }

static void receive_all(int fd, char *into, size_t n) {
  while (n > 0) {
    const ssize_t got = recv(fd, into, n, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) fail("recv");
    into += got, n -= (size_t)got;
  }
}

// Replies per second, of which half of `depth` are asked for again at once, from each server in turn. `total`: all.
static double rate(const int *fds, size_t servers, size_t request, size_t reply, size_t depth, double seconds, size_t *total) {
  const size_t each = depth > 2 * servers ? depth / servers : 2, turn = each / 2;
  char *const out = calloc(each, request), *const in = malloc(each * reply);
  if (out == NULL || in == NULL) fail("malloc");
  memset(in, 1, each * reply);
  for (size_t i = 0; i < servers; ++i) send_all(fds[i], out, 2 * turn * request);
  double start = now_s(), end = start + seconds / 4;  // warm up
  *total = 0;
  size_t done = 0;
  for (int measured = 0;;) {
    for (size_t i = 0; i < servers; ++i) {
      receive_all(fds[i], in, turn * reply);
      send_all(fds[i], out, turn * request);
      done += turn;
    }
    const double now = now_s();
    if (now < end) continue;
    *total += done;
    if (measured) return (double)done / (now - start);
    measured = 1, done = 0, start = now, end = now + seconds;
  }
}

static double processor_s(int who) {
  struct rusage used;
  getrusage(who, &used);
  return (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) + 1e-6 * (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec);
}

static void end(const pid_t *servers, size_t count) {
  for (size_t i = 0; i < count; ++i) kill(servers[i], SIGKILL), waitpid(servers[i], NULL, 0);
}

int main(int argc, char **argv) {
  pid_t servers[most_servers];
  int fds[most_servers];
  const int streams = argc == 6 && strcmp(argv[1], "stream") == 0, echoes = argc == 8 && strcmp(argv[1], "echo") == 0;
  if (streams || echoes) {
    const size_t count = echoes ? strtoul(argv[6], NULL, 10) : 1, depth = strtoul(argv[4], NULL, 10);
    const size_t request = streams ? 8 : strtoul(argv[2], NULL, 10), reply = strtoul(argv[3], NULL, 10);
    if (count < 1 || count > most_servers) return 2;
    void (*const serve)(int, char **) = streams ? stream : strcmp(argv[7], "each") == 0 ? echo_each : echo_all;
    for (size_t i = 0; i < count; ++i) fds[i] = connected(&servers[i], serve, argv + 2);
    size_t total;
    const double per_s = (streams ? (double)reply : 1.0) * rate(fds, count, request, reply, depth, atof(argv[5]), &total);
    end(servers, count);
    const double used_s = processor_s(RUSAGE_SELF) + processor_s(RUSAGE_CHILDREN);
    printf("%.1f %.12f\n", per_s, used_s / (double)total);
  } else if (argc == 5 && strcmp(argv[1], "delay") == 0) {
    const size_t request = strtoul(argv[2], NULL, 10), reply = strtoul(argv[3], NULL, 10);
    fds[0] = connected(&servers[0], echo_all, argv + 2);
    char *const memory = calloc(1, request + reply);
    if (memory == NULL) fail("calloc");
    for (long i = -100, count = atol(argv[4]); i < count; ++i) {
      const double start = now_s();
      send_all(fds[0], memory, request);
      receive_all(fds[0], memory, reply);
      if (i >= 0) printf("%.9f\n", now_s() - start);
    }
    end(servers, 1);
  } else {
    fprintf(stderr, "usage: sockets stream FILE BYTES DEPTH SECONDS | echo REQUEST REPLY DEPTH SECONDS SERVERS all|each | delay REQUEST REPLY COUNT\n");
    return 2;
  }
  return 0;
}
