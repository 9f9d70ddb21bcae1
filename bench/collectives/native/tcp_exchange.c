// The bound of everything that goes over TCP: plain programs in a ring, each sending BYTES to the next and receiving as
// many from the one before, at the same time, from one array into another. With two programs they exchange their arrays.
//
//   tcp_exchange SOCKET RANK PROGRAMS ADDRESS
//
// It listens at ADDRESS. Orders: "connect PORT ADDRESS" (of the next program), "prepare TYPE BYTES", "time threads|poll|steps LOOPS", "check". Two ways are measured, the faster
// one is the bound: a thread that sends beside one that receives, with blocking calls; or one thread that polls. "steps" is
// what an allreduce must do at the least: the bytes go in 2 (programs - 1) steps, each with a header, and a step is sent when
// the one before has arrived; a program that has nothing to do offers its processor to others and looks again.
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>

#include "orders.h"

#define HEADER 64
static const size_t call_bytes = 1 << 20;  // of one send or recv
static int rank, programs, next_fd, previous_fd;
static char *outgoing, *incoming;
static size_t bytes;

static int listen_at(const char *host, int *port) {
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = inet_addr(host)};
  socklen_t length = sizeof address;
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  if (fd < 0 || bind(fd, (struct sockaddr *)&address, sizeof address) != 0 || listen(fd, 4) != 0) die("listen");
  if (getsockname(fd, (struct sockaddr *)&address, &length) != 0) die("getsockname");
  *port = ntohs(address.sin_port);
  return fd;
}

static void connect_to(int listener, int port, const char *host) {
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = inet_addr(host)};
  const int on = 1;
  next_fd = socket(AF_INET, SOCK_STREAM, 0);
  if (next_fd < 0 || connect(next_fd, (struct sockaddr *)&address, sizeof address) != 0) die("connect to the next");
  previous_fd = accept(listener, NULL, NULL);
  if (previous_fd < 0) die("accept");
  setsockopt(next_fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  ANSWER("{}");
}

static void transfer(int sends, char *at, size_t left) {
  while (left > 0) {
    const size_t most = left < call_bytes ? left : call_bytes;
    const ssize_t moved = sends ? send(next_fd, at, most, MSG_NOSIGNAL) : recv(previous_fd, at, most, 0);
    if (moved <= 0) die(sends ? "send" : "recv");
    at += moved;
    left -= (size_t)moved;
  }
}

static void *send_all(void *unused) {
  transfer(1, outgoing, bytes);
  return unused;
}

static void with_threads(void) {
  pthread_t sender;
  if (pthread_create(&sender, NULL, send_all, NULL) != 0) die("pthread_create");
  transfer(0, incoming, bytes);
  pthread_join(sender, NULL);
}

static void with_poll(void) {
  size_t sent = 0, received = 0;
  while (sent < bytes || received < bytes) {
    struct pollfd fds[2] = {{.fd = sent < bytes ? next_fd : -1, .events = POLLOUT}, {.fd = received < bytes ? previous_fd : -1, .events = POLLIN}};
    if (poll(fds, 2, -1) < 0) die("poll");
    if (fds[0].revents != 0) {
      const ssize_t moved = send(next_fd, outgoing + sent, bytes - sent < call_bytes ? bytes - sent : call_bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
      if (moved < 0 && errno != EAGAIN) die("send");
      if (moved > 0) sent += (size_t)moved;
    }
    if (fds[1].revents != 0) {
      const ssize_t moved = recv(previous_fd, incoming + received, bytes - received < call_bytes ? bytes - received : call_bytes, MSG_DONTWAIT);
      if (moved == 0 || (moved < 0 && errno != EAGAIN)) die("recv");
      if (moved > 0) received += (size_t)moved;
    }
  }
}

static int later(ssize_t moved) { return moved < 0 && (errno == EAGAIN || errno == EWOULDBLOCK); }

static void one_step(char *out, char *in, size_t payload) {
  char sent_header[HEADER] = {0}, received_header[HEADER];
  size_t sent = 0, received = 0;
  while (sent < HEADER + payload || received < HEADER + payload) {
    int moves = 0;
    if (sent < HEADER + payload) {
      struct iovec pieces[2] = {{sent_header + sent, HEADER - sent}, {out, payload}};
      if (sent >= HEADER) pieces[1] = (struct iovec){out + (sent - HEADER), payload - (sent - HEADER)};
      const struct msghdr message = {.msg_iov = sent < HEADER ? pieces : pieces + 1, .msg_iovlen = sent < HEADER ? 2 : 1};
      const ssize_t moved = sendmsg(next_fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
      if (moved < 0 && !later(moved)) die("sendmsg");
      if (moved > 0) sent += (size_t)moved, moves = 1;
    }
    if (received < HEADER + payload) {
      char *to = received < HEADER ? received_header + received : in + (received - HEADER);
      const ssize_t moved = recv(previous_fd, to, (received < HEADER ? HEADER : HEADER + payload) - received, MSG_DONTWAIT);
      if (moved == 0 || (moved < 0 && !later(moved))) die("recv");
      if (moved > 0) received += (size_t)moved, moves = 1;
    }
    if (!moves) sched_yield();
  }
}

static void with_steps(void) {
  const size_t steps = 2 * (size_t)(programs - 1), each = bytes / steps;
  for (size_t step = 0, at = 0; step < steps; ++step, at += each) one_step(outgoing + at, incoming + at, step + 1 == steps ? bytes - at : each);
}

static void start_together(void) {  // a token goes round twice: everybody is here, everybody may start
  char token = 't';
  for (int lap = 0; lap < 2; ++lap) {
    if (rank == 0) transfer(1, &token, 1);
    transfer(0, &token, 1);
    if (rank != 0) transfer(1, &token, 1);
  }
}

static void prepare(size_t wanted) {
  free(outgoing);
  free(incoming);
  outgoing = incoming = NULL;
  bytes = wanted;
  if (bytes > 0) {
    char *block = make_block(rank, "fp32");
    outgoing = big_buffer(bytes);
    incoming = big_buffer(bytes);
    memset(incoming, 0, bytes);
    fill_with(outgoing, bytes, block, BLOCK * 4);
    free(block);
  }
  ANSWER("{}");
}

static void measure(const char *way, int loops) {
  double *each = malloc((size_t)loops * sizeof *each);
  start_together();
  const double begun = now_s();
  double before = begun;
  for (int i = 0; i < loops; ++i) {
    if (strcmp(way, "poll") == 0) with_poll();
    else if (strcmp(way, "steps") == 0) with_steps();
    else with_threads();
    const double after = now_s();
    each[i] = after - before;
    before = after;
  }
  answer_times(before - begun, each, loops);
  free(each);
}

static void check(void) {
  char *block = make_block((rank + programs - 1) % programs, "fp32");
  ANSWER("{\"right\": %s}", filled_with(incoming, bytes, block, BLOCK * 4) ? "true" : "false");
  free(block);
}

int main(int argc, char **argv) {
  char line[MAX_LINE], *words[MAX_WORDS], more[64];
  int port;
  if (argc != 5) return 2;
  rank = atoi(argv[2]);
  programs = atoi(argv[3]);
  const int listener = listen_at(argv[4], &port);
  snprintf(more, sizeof more, ", \"port\": %d", port);
  orders_open(argv[1], rank, more);
  while (orders_next(line, words) > 0) {
    if (strcmp(words[0], "connect") == 0) connect_to(listener, atoi(words[1]), words[2]);
    if (strcmp(words[0], "prepare") == 0) prepare((size_t)strtoull(words[2], NULL, 10));
    if (strcmp(words[0], "time") == 0) measure(words[1], atoi(words[2]));
    if (strcmp(words[0], "check") == 0) check();
  }
  return 0;
}
