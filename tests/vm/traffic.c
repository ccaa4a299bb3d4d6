/* RDMA traffic between two devices of one machine: a reliable connection, both ends in here.
 *
 *     traffic SENDER RECEIVER EVERY
 *
 * sends a message every 5 ms. With EVERY = 1 the receiver is always ready for more; else it gets
 * ready for a single one every so many turns, and one message at a time is under way: those behind
 * it rxe would count as lost. At SIGTERM it ends and prints how many arrived.
 */
#include <infiniband/verbs.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MESSAGE_BYTES = 1024, DEPTH = 16, GID_INDEX = 1 /* the IPv4 address's */ };

static const struct timespec TURN = {0, 5000000};

struct end {
    struct ibv_context *device;
    struct ibv_cq *completions;
    struct ibv_qp *pair;
    struct ibv_mr *memory;
    union ibv_gid gid;
    char buffer[MESSAGE_BYTES];
};

static volatile sig_atomic_t ending;

static void end_it(int signal) { ending = signal; }

static void check(int good, const char *what) {
    if (!good) {
        perror(what);
        exit(1);
    }
}

static void open_end(struct end *end, const char *name) {
    struct ibv_device **devices = ibv_get_device_list(NULL);
    check(devices != NULL, "device list");
    for (int i = 0; devices[i]; i++)
        if (!strcmp(ibv_get_device_name(devices[i]), name))
            end->device = ibv_open_device(devices[i]);
    check(end->device != NULL, name);
    struct ibv_pd *domain = ibv_alloc_pd(end->device);
    end->memory = ibv_reg_mr(domain, end->buffer, MESSAGE_BYTES, IBV_ACCESS_LOCAL_WRITE);
    check(end->memory != NULL, "memory region");
    end->completions = ibv_create_cq(end->device, 2 * DEPTH, NULL, NULL, 0);
    check(end->completions != NULL, "completion queue");
    struct ibv_qp_init_attr attributes = {
        .send_cq = end->completions,
        .recv_cq = end->completions,
        .cap = {DEPTH, DEPTH, 1, 1, 0},
        .qp_type = IBV_QPT_RC,
    };
    end->pair = ibv_create_qp(domain, &attributes);
    check(end->pair != NULL, "queue pair");
    check(!ibv_query_gid(end->device, 1, GID_INDEX, &end->gid), "gid");
}

static void connect_end(struct end *end, const struct end *peer) {
    struct ibv_qp_attr state = {.qp_state = IBV_QPS_INIT, .port_num = 1};
    int mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
    check(!ibv_modify_qp(end->pair, &state, mask), "to INIT");
    state = (struct ibv_qp_attr){
        .qp_state = IBV_QPS_RTR,
        .path_mtu = IBV_MTU_1024,
        .dest_qp_num = peer->pair->qp_num,
        .min_rnr_timer = 14, /* 1 ms */
        .max_dest_rd_atomic = 1,
        .ah_attr = {
            .is_global = 1,
            .port_num = 1,
            .grh = {.dgid = peer->gid, .sgid_index = GID_INDEX, .hop_limit = 64},
        },
    };
    mask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
           IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
    check(!ibv_modify_qp(end->pair, &state, mask), "to RTR");
    state = (struct ibv_qp_attr){
        .qp_state = IBV_QPS_RTS,
        .timeout = 20, /* 4 s: rxe also counts them for a receiver that is not ready */
        .retry_cnt = 7,
        .rnr_retry = 7, /* without end */
        .max_rd_atomic = 1,
    };
    mask = IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
           IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC;
    check(!ibv_modify_qp(end->pair, &state, mask), "to RTS");
}

static void post(struct end *end, int sends) {
    struct ibv_sge piece = {(uintptr_t)end->buffer, MESSAGE_BYTES, end->memory->lkey};
    struct ibv_send_wr send = {
        .sg_list = &piece, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED};
    struct ibv_recv_wr receive = {.sg_list = &piece, .num_sge = 1}, *bad_receive;
    struct ibv_send_wr *bad_send;
    check(sends ? !ibv_post_send(end->pair, &send, &bad_send)
                : !ibv_post_recv(end->pair, &receive, &bad_receive),
          "post");
}

/* How many have completed since the last time. */
static int completed(struct end *end) {
    struct ibv_wc done[2 * DEPTH];
    int count = ibv_poll_cq(end->completions, 2 * DEPTH, done);
    for (int i = 0; i < count; i++)
        if (done[i].status != IBV_WC_SUCCESS) {
            fprintf(stderr, "%s\n", ibv_wc_status_str(done[i].status));
            exit(1);
        }
    return count;
}

int main(int count, char **arguments) {
    static struct end sender, receiver;
    int sending = 0, ready = 0, arrived = 0;
    if (count != 4)
        return 64;
    int every = atoi(arguments[3]), most = every == 1 ? DEPTH : 1;
    signal(SIGTERM, end_it);
    open_end(&sender, arguments[1]);
    open_end(&receiver, arguments[2]);
    connect_end(&receiver, &sender);
    connect_end(&sender, &receiver);
    for (int turn = 0; !ending; turn++) {
        if (turn % every == 0)
            for (; ready < most; ready++)
                post(&receiver, 0);
        if (sending < most) {
            post(&sender, 1);
            sending++;
        }
        nanosleep(&TURN, NULL);
        sending -= completed(&sender);
        int received = completed(&receiver);
        ready -= received;
        arrived += received;
    }
    printf("%d\n", arrived);
    return 0;
}
