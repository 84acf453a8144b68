// The sentences of all callers, and who decodes which of them when.
//
// Clients submit sentences and collect what comes of them. Threads decode: a client's own thread until its sentences are done, and
// threads that serve all. A thread drives one of a fixed number of workers; a worker keeps its sentences when its thread leaves,
// and another thread continues with them. Where sentences are done, waiting ones take their places at the next step.
#pragma once

#include <memory>
#include <mutex>
#include <set>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "platform.h"
#include "worker.h"

namespace transduce {

struct Event {
    int64_t ticket;
    Outcome outcome;
    std::vector<Finished> hypotheses;  // `tokens`: one, with the tokens that are new
};

class Queue;

// Sentences of one caller. All is the queue's and under its lock, except `collected`, which is the collecting thread's.
struct Client {
    explicit Client(std::shared_ptr<Queue> queue) : queue(std::move(queue)) {}
    const std::shared_ptr<Queue> queue;
    std::unordered_map<int64_t, std::shared_ptr<Request>> open;  // sentences that have not ended
    std::vector<Event> events, collected;
    Condition arrived;
    std::shared_ptr<const Bell> bell;  // of an event loop that collects
    bool rung = false;                 // since the last `collect`
    bool closed = false;
};

// What a queue is doing.
struct Load {
    int64_t n_waiting, n_waiting_tokens, n_open, n_steps, n_rows;
};

class Queue {
public:
    Queue(const Model& model, int n_workers);

    void join(Client& client);
    // Forgets a client and all its sentences.
    void leave(Client& client);
    // Adds sentences, whose tickets must be new. The smallest `order` comes first. `works`: the calling thread calls `work` next.
    void submit(Client& client, std::vector<std::shared_ptr<Request>> requests, double order, bool works);
    // The sentence ends at the next step. False if it has ended already.
    bool cancel(Client& client, int64_t ticket);
    // A file descriptor that can be read when there is something to collect.
    int fd(Client& client);
    // Cancels all sentences and takes no more.
    void close(Client& client);
    // Decodes in this thread until all sentences of the client have ended (null: until the queue is closed), or until a time.
    // Returns how many sentences of the client have not ended.
    int64_t work(const Client* client, Time until);
    // Moves what has come of a client's sentences to `collected`; waits for it until a time.
    void collect(Client& client, Time until);
    // Cancels all and lets all threads leave.
    void close();
    // And waits for those that decode.
    void close_and_wait();
    Load load();

private:
    struct Waiter {  // a thread that may drive a worker
        const Client* client;
        bool woken = false;
        Condition wake;
    };
    struct Before {
        bool operator()(const std::shared_ptr<Request>& a, const std::shared_ptr<Request>& b) const {
            if (a->order != b->order) return a->order < b->order;
            if (a->submission != b->submission) return a->submission < b->submission;
            if (a->ids.size() != b->ids.size()) return a->ids.size() > b->ids.size();
            return a->number < b->number;
        }
    };
    using Lock = std::unique_lock<std::mutex>;

    bool stays(const Client* client, Time until) const;
    void drive(Worker& worker, Lock& lock, const Client* client, Time until);
    void sleep(Lock& lock, const Client* client, Time until);
    void wake(size_t n);
    Worker* take_worker();
    void deliver(Worker::Slot& slot);
    void admit(Worker& worker);
    void end(Request& request, Outcome outcome, std::vector<Finished> hypotheses = {});
    void report(Client& client, Event event);
    void unlock(Lock& lock);
    void close_client(Client& client);

    const Model& model_;
    std::mutex mutex_;
    bool closed_ = false;
    int n_working_ = 0;  // threads in `work`
    int64_t n_submitted_ = 0, n_arrived_ = 0, n_waiting_tokens_ = 0, n_steps_ = 0, n_rows_ = 0;
    Condition all_left_;
    std::unordered_set<Client*> clients_;
    std::set<std::shared_ptr<Request>, Before> waiting_;
    std::vector<std::unique_ptr<Worker>> workers_;
    std::vector<Worker*> free_workers_;  // without a thread, the longest first
    std::vector<Waiter*> idle_;
    std::vector<std::shared_ptr<const Bell>> bells_;  // to ring
};

}  // namespace transduce
