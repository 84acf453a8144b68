// The sentences of all callers, and their assignment to threads.
//
// Clients submit sentences and collect events. Two kinds of threads decode: a client's own thread, until the client's sentences are done, and
// threads that serve all clients. A thread drives one of a fixed number of workers. When the thread leaves, the worker keeps its sentences, and
// another thread continues with them. When sentences are done, waiting sentences replace them at the next step.
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
    std::vector<Finished> hypotheses;  // an event `tokens` has one, which contains only new tokens
};

class Queue;

// The sentences of one caller. The queue's lock guards all members except `collected`, which belongs to the collecting thread.
struct Client {
    explicit Client(std::shared_ptr<Queue> queue) : queue(std::move(queue)) {}
    const std::shared_ptr<Queue> queue;
    std::unordered_map<int64_t, std::shared_ptr<Request>> open;  // sentences that have not ended
    std::vector<Event> events, collected;
    std::shared_ptr<const Bell> bell;  // wakes the event loop that collects
    bool rung = false;                 // whether the bell has rung since the last `collect`
    bool closed = false;
};

class Queue {
public:
    Queue(const Model& model, int n_workers);

    void join(Client& client);
    // Forgets a client and all its sentences.
    void leave(Client& client);
    // Adds sentences, whose tickets must be new. Sentences with the smallest `order` are decoded first. `works`: whether the calling thread
    // calls `work` next.
    void submit(Client& client, std::vector<std::shared_ptr<Request>> requests, double order, bool works);
    // Ends a sentence at the next step, unless it has ended already.
    void cancel(Client& client, int64_t ticket);
    // Returns a file descriptor that is readable when there are events to collect.
    int fd(Client& client);
    // Cancels all sentences of the client and accepts no more.
    void close(Client& client);
    // Decodes in this thread until all sentences of the client have ended (without a client: until the queue is closed), or until a time.
    // Returns the number of the client's sentences that have not ended.
    int64_t work(const Client* client, Time until);
    // Moves the client's events to `collected`.
    void collect(Client& client);
    // Cancels all sentences and makes all threads leave `work`.
    void close();
    // Closes the queue and waits until all threads have left `work`.
    void close_and_wait();
    transduce_load load();

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
    std::vector<Worker*> free_workers_;  // workers without a thread; first, the worker that has been free for the longest time
    std::vector<Waiter*> idle_;
    std::vector<std::shared_ptr<const Bell>> bells_;  // bells to ring when the lock is released
};

}  // namespace transduce
